"""What the ranks of ``test_fsdp_expert_parallel.py`` run: experts that are divided among ranks, and
the same models on one rank.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_helpers import make_args, make_samples, weights_of
from fsdp_ranks import rank_batch, train
from lora_ranks import LORA, random_factors
from needs import ALL

from slime.backends.collectives import local, whole_tensors
from slime.backends.create import create_backend
from slime.backends.fsdp import experts
from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.train_loop import train_on_rollout
from slime.data.fields import RankBatch

Result = dict[str, Any]
Case = tuple[str, dict[str, Any]]
CONTEXT = {"megatron": {"context_parallel_size": 2}}
ULYSSES = CONTEXT | {"context_parallel_kind": "ulysses"}
RECOMPUTED = {"gradient_checkpointing": True}
ROUTES = dict(use_rollout_routing_replay=True, use_routing_replay=True)
ADAPTER = LORA | dict(lora_target_modules=["all-linear", "experts"], lora_sync="merged")
TWO: dict[str, Case] = {
    "Qwen3-MoE": ("Qwen3-MoE", {}),
    "Qwen2-MoE": ("Qwen2-MoE", RECOMPUTED),
    "Qwen3-Next": ("Qwen3-Next", ULYSSES | RECOMPUTED),
    "Qwen3.5-MoE": ("Qwen3.5-MoE", {"fsdp_accumulate_unsharded_gradients": True}),
    "gpt-oss": ("gpt-oss", {"fsdp_reshard_after_forward": False}),
    "MiniMax-M2": ("MiniMax-M2", CONTEXT),
    "GLM-4.5": ("GLM-4.5", RECOMPUTED),
    "one rank's experts": ("one rank's experts", RECOMPUTED),
    "GLM-4.7-Flash": ("GLM-4.7-Flash", {"freeze_params_name_list": [r"layers\.1\.mlp\.gate"]}),
    "DeepSeek V3": ("DeepSeek V3", {"attn_implementation": "sdpa"}),
    "DeepSeek V3.2": ("DeepSeek V3.2", {}),
    "GLM-5": ("GLM-5", {}),
    "Nemotron-H": ("Nemotron-H", {}),
    "Mixtral": ("Mixtral", {"fsdp_cpu_offload": True}),
    "Granite 4": ("Granite 4", {}),
    "Llama 4": ("Llama 4", RECOMPUTED),
    "muon": ("Qwen3-MoE", {"optimizer": "muon"}),
    "adapter": ("Qwen3-MoE", ADAPTER),
    "critic": ("Qwen3-MoE", {"advantage_estimator": "ppo"}),
    "routes": ("GLM-4.5", ROUTES | RECOMPUTED),
    "adapter, routes": ("Qwen3-MoE", ADAPTER | ROUTES | ULYSSES),
    "adapter, delta nets": ("Qwen3.5-MoE", ADAPTER | ULYSSES),
}
"""By name: the model and its flags on two ranks, each of which has half of the experts."""
LONG = ("Qwen2-MoE", "GLM-4.5", "GLM-4.7-Flash", "DeepSeek V3.2", "Granite 4")
"""Those of the long circle: their experts and routers are also those of another case."""
FOUR: dict[str, Case] = {
    "two by two": ("Qwen3-MoE", {"fsdp_expert_parallel_size": 2}),
    "adapter, two by two": (
        "Qwen3-MoE",
        ADAPTER | RECOMPUTED | {"fsdp_expert_parallel_size": 2},
    ),
    "replicas": ("gpt-oss", {"fsdp_expert_parallel_size": 2, "fsdp_shard_size": 2}),
    "bfloat16": ("Qwen3-MoE", {"fsdp_expert_parallel_size": 4, "train_dtype": "bfloat16"}),
}
ONE_RANK = {"two by two": "Qwen3-MoE", "adapter, two by two": "adapter", "replicas": "gpt-oss"}
"""Which case of :data:`TWO` has the same result on one rank."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "plain": (2, {}),
    "divided": (2, {"fsdp_expert_parallel_size": 2}),
    "two by two": (4, {"fsdp_expert_parallel_size": 2}),
}
READERS = {"divided": ["divided", "one"], "two by two": ["two by two", "divided"]}
READERS["plain"] = ["two by two"]
"""Which layouts read the snapshot of each."""
SAVED = {"lr_decay_style": "linear", "lr_warmup_iters": 3, "keep_old_actor": True}
ON_ONE_RANK_ONLY = ("megatron", "fsdp_cpu_offload", "fsdp_accumulate_unsharded_gradients")


class Rank:
    def __init__(self, rank: int, world_size: int, paths: dict[str, Path], port: int) -> None:
        self.rank, self.world_size, self.paths, self.port = rank, world_size, paths, port

    def make(self, model: str, **flags: Any) -> FsdpBackend:
        role = "critic" if flags.get("advantage_estimator") == "ppo" else "actor"
        args = make_args(self.paths[model], **flags)
        backend = create_backend(args, role, self.rank, self.world_size, "127.0.0.1", self.port)
        assert isinstance(backend, FsdpBackend)
        return backend


def whole(named: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in whole_tensors(named)}


def with_routes(batch: RankBatch, layers: int) -> RankBatch:
    """Add the experts of an engine: two of four for every token but the last, drawn from the
    sample's own tokens."""
    routes = []
    for tokens in batch["tokens"]:
        generator = torch.Generator().manual_seed(int(tokens.sum()))
        draws = torch.rand(len(tokens) - 1, layers, 4, generator=generator)
        routes.append(draws.argsort(-1)[..., :2].to(torch.uint8))
    return batch | {"rollout_routed_experts": routes}


def steps(ranks: Rank, model: str, **flags: Any) -> Result:
    """Two steps: of three groups, so that one of two ranks has a micro-batch less, and of one that
    has nothing to do.
    """
    backend = ranks.make(model, **flags)
    if backend.adapter is not None:
        random_factors(backend)
    gradients: list[dict[str, torch.Tensor]] = []
    norm = backend.optimizer.grad_norm

    def noted() -> float:
        named = [(n, p.grad) for n, p in backend.optimizer.named if p.grad is not None]
        gradients.append(whole(named))
        return norm()

    backend.optimizer.grad_norm = noted  # type: ignore[method-assign]
    computed: list[tuple[int, int]] = []
    outputs = experts.expert_outputs

    def counted(self: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        computed.append((len(self.down_proj), len(rows)))
        return outputs(self, rows, counts)

    experts.expert_outputs = counted

    def batch_of(samples: list[Any]) -> RankBatch:
        batch = rank_batch(samples, backend.data_parallel_rank, backend.data_parallel_size)
        return with_routes(batch, 2) if backend.replay is not None else batch

    batch = batch_of(make_samples(groups=3))
    few = batch_of(make_samples(3, seed=3, zero_groups=2))
    scores = backend.values(batch) if backend.role == "critic" else None
    result = dict(
        scores=scores or backend.log_probs(batch)["log_probs"],
        groups=batch["group_indices"],
        metrics=[train_on_rollout(backend, x)[0] for x in (batch, few)],
        gradients=gradients,
        weights=whole([(name, p.detach()) for name, p in backend.named_parameters]),
        held={name: len(local(p)) for name, p in backend.named_parameters},
        computed=computed,
    )
    experts.expert_outputs = outputs
    if backend.adapter is not None:
        result["identity"] = backend.adapter.identity()
    backend.sleep()
    backend.wake()
    if backend.role == "actor":
        result["sent"] = weights_of(backend)
    return result


def state_of(backend: FsdpBackend) -> Result:
    with backend.bank.using("old_actor"):
        copy = weights_of(backend)
    optimizer = whole(list(backend.optimizer.tensors().items()))
    return dict(weights=weights_of(backend), copy=copy, optimizer=optimizer)


def saved(ranks: Rank, name: str, **flags: Any) -> Result:
    """A snapshot, an export, and what comes next in the run that wrote them."""
    backend = ranks.make("Qwen3-MoE", **SAVED, **flags)
    train(backend, make_samples())
    backend.copy_weights("actor", "old_actor")
    train(backend, make_samples(seed=1))
    backend.save(ranks.paths["output"] / name)
    backend.save_hf(ranks.paths["output"] / f"hf {name}")
    return state_of(backend) | dict(next=train(backend, make_samples(seed=2)))


def loaded(ranks: Rank, name: str, **flags: Any) -> Result:
    backend = ranks.make("Qwen3-MoE", **SAVED, **flags)
    backend.load(ranks.paths["output"] / name)
    return state_of(backend) | dict(next=train(backend, make_samples(seed=2)))


def of_size(ranks: Rank) -> Result:
    """All cases of a number of ranks."""
    size = ranks.world_size
    results: Result = {}
    if size == 4 and not ALL:
        results = {name: steps(ranks, model, **flags) for name, (model, flags) in FOUR.items()}
    for name, (model, flags) in TWO.items() if size < 4 else ():
        if (name in LONG) != ALL:
            continue
        if size == 1:
            flags = {key: x for key, x in flags.items() if key not in ON_ONE_RANK_ONLY}
        results[name] = steps(ranks, model, **flags, fsdp_expert_parallel_size=size)
    for layout in READERS if not ALL else ():
        if LAYOUTS[layout][0] == size:
            results[f"saved {layout}"] = saved(ranks, layout, **LAYOUTS[layout][1])
    return results


def read(ranks: Rank) -> Result:
    results: Result = {}
    for name, layouts in READERS.items() if not ALL else ():
        for layout in layouts:
            size, flags = LAYOUTS[layout]
            if size == ranks.world_size:
                results[f"{name} read by {layout}"] = loaded(ranks, name, **flags)
    return results


def worker(rank: int, paths: dict[str, Path], ports: list[int]) -> None:
    """Entry of a spawned rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    results: Result = {}
    for size, job, port in zip((4, 2, 4, 2, 1), (of_size,) * 2 + (read,) * 3, ports, strict=True):
        if rank < size:
            results |= {(size, name): x for name, x in job(Rank(rank, size, paths, port)).items()}
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank == 0:
        one = of_size(Rank(0, 1, paths, ports[-1]))
        results |= {(1, name): result for name, result in one.items()}
    torch.save(results, paths["output"] / f"rank{rank}.pt")
