"""What the ranks of ``test_fsdp_ranks.py`` run: one launch, every layout in turn."""

from __future__ import annotations

import importlib.util
import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import make_args, make_batch, make_samples, weights_of
from torch.utils._python_dispatch import TorchDispatchMode

from slime.backends.bank import CopySettings, keeps_copies_on_device
from slime.backends.base import TrainNeeds
from slime.backends.collectives import local
from slime.backends.create import create_backend
from slime.backends.fsdp import backend as fsdp_backend
from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.shared import NonFiniteError
from slime.backends.train_loop import train_on_rollout

Result = dict[str, Any]


def rank_batch(samples: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Group g goes to rank g mod world size; one micro-batch a group."""
    mine = [s for s in samples if s["group"] % world_size == rank]
    return make_batch(mine, [[list(range(i, i + 4)) for i in range(0, len(mine), 4)]], samples)


def train(backend: FsdpBackend, samples: list[dict[str, Any]]) -> dict[str, float]:
    batch = rank_batch(samples, backend.data_parallel_rank, backend.data_parallel_size)
    return train_on_rollout(backend, batch)[0]


def optimizer_state(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    state = backend.optimizer.tensors()
    return {
        k: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for k, t in state.items()
    }


def two_steps(make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int) -> Result:
    """GRPO with a reference model of other weights; in the second step half of the groups have no
    advantage, so that at four ranks two of them have nothing to do."""
    flags = dict(
        kl_coef=0.01, kl_loss_type="k3", ref_load=str(paths["reference"]), entropy_coef=0.0
    )
    backend = make("llama", **flags)
    log_probs = backend.log_probs(rank_batch(make_samples(), backend.rank, world_size))["log_probs"]
    metrics = [train(backend, make_samples())]
    backend.args.kl_coef = 0.0
    backend.needs = TrainNeeds.from_args(backend.args)
    metrics.append(train(backend, make_samples(seed=3, zero_groups=2)))
    metrics.append(train(backend, make_samples(seed=4)))
    result = dict(metrics=metrics, weights=weights_of(backend), optimizer=optimizer_state(backend))
    return result | dict(log_probs=log_probs)


def place_of_copies(
    make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int
) -> Result:
    """Whether copies of the weights stay on an accelerator that has room on all ranks, and one that
    has on rank 0.
    """
    backend = make("llama")
    args = make_args(paths["llama"], use_kl_loss=True, offload_train=False, colocate=False)
    copies = CopySettings.of(TrainNeeds.from_args(args), args, args, False, None)
    place = partial(keeps_copies_on_device, copies, backend.named_parameters)
    return dict(everywhere=place(10**9), on_one_rank=place(10**9 if backend.rank == 0 else 0))


def checkpointed(
    make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int
) -> Result:
    backend = make("llama", gradient_checkpointing=True, entropy_coef=0.01)
    return dict(
        metrics=[train(backend, make_samples()), train(backend, make_samples(seed=1))],
        weights=weights_of(backend),
    )


def qwen3(make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int) -> Result:
    backend = make(
        "qwen3",
        calculate_per_token_loss=True,
        freeze_params_name_list=["embed_tokens", r"layers\.0\.mlp"],
    )
    return dict(metrics=[train(backend, make_samples())], weights=weights_of(backend))


def context_parallel(
    make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int
) -> Result:
    """Two ranks share the tokens of every sample; GSPO sums over whole sequences, with a
    gradient.
    """
    return divided_samples(make, min(world_size, 2))


def ulysses(make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int) -> Result:
    """The same by heads, over all ranks: four of them have two heads of keys and values."""
    sent: list[torch.Size] = []
    exchange = dist.all_to_all_single

    def counted(output: torch.Tensor, tensor: torch.Tensor, **given: Any) -> Any:
        sent.append(tensor.shape)
        return exchange(output, tensor, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        result = divided_samples(make, world_size, context_parallel_kind="ulysses")
    return result | dict(ranks_that_exchange={shape[0] for shape in sent})


def divided_samples(make: Callable[..., FsdpBackend], ranks: int, **flags: Any) -> Result:
    size = {"context_parallel_size": ranks}
    flags |= dict(megatron=size, advantage_estimator="gspo", entropy_coef=0.01)
    backend = make("qwen3", **flags)
    mine = backend.data_parallel_rank, backend.data_parallel_size
    log_probs = backend.log_probs(rank_batch(make_samples(), *mine))["log_probs"]
    metrics = [train(backend, make_samples()), train(backend, make_samples(seed=3, zero_groups=2))]
    return dict(metrics=metrics, weights=weights_of(backend), log_probs=log_probs)


def whole_sequences(
    make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int
) -> Result:
    """Layers with a state and experts, recomputed. Two ranks share the tokens of every sample, and
    deal out whole sequences for these layers: one of them gets none, because each micro-batch is a
    single sample."""
    size = {"context_parallel_size": world_size}
    backend = make("hybrid", megatron=size, gradient_checkpointing=True, entropy_coef=0.01)
    samples = make_samples()
    batch = make_batch(samples, [[[i] for i in range(len(samples))]], samples)
    metrics = [
        train_on_rollout(backend, batch)[0],
        train(backend, make_samples(seed=3, zero_groups=2)),
    ]
    return dict(metrics=metrics, weights=weights_of(backend))


def forward_packs(
    make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int
) -> Result:
    """Six groups, so that of four ranks two have twice as many samples as the others. By
    context-parallel size: the rank's groups, its log-probs in packs of at most 30 tokens (one rank:
    in training's), and how many it ran."""
    result: Result = {}
    for context in {1, min(world_size, 2)}:
        budget = 30 // context if world_size > 1 else None
        size = {"context_parallel_size": context}
        backend = make("qwen3", megatron=size, log_probs_max_tokens_per_gpu=budget)
        samples, runs = make_samples(groups=6), []
        backend.scorer.register_forward_pre_hook(lambda *_, seen=runs: seen.append(1))
        batch = rank_batch(samples, backend.data_parallel_rank, backend.data_parallel_size)
        log_probs = backend.log_probs(batch)["log_probs"]
        counts = dict(runs=len(runs), training=len(batch["micro_batch_indices"]))
        counts["own"] = len(backend.forward_packs(batch))
        result[f"context {context}"] = dict(
            groups=batch["group_indices"], log_probs=log_probs, **counts
        )
    return result


def critic(make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int) -> Result:
    backend = make("llama", role="critic", advantage_estimator="ppo")
    metrics = [train(backend, make_samples()) for _ in range(2)]
    full = {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for n, p in backend.named_parameters
    }
    return dict(metrics=metrics, weights={n: t.clone() for n, t in full.items()})


def bfloat16(make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int) -> Result:
    backend = make("llama", train_dtype="bfloat16")
    metrics = [train(backend, make_samples()), train(backend, make_samples(seed=1))]
    masters = {str(p.dtype) for _, p in backend.named_parameters}
    return dict(metrics=metrics, weights=weights_of(backend), masters=masters)


def bf16_sums(make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int) -> Result:
    """Whether bfloat16 has each value of the gradients after the first micro-batch, which are kept
    in float32.
    """
    result: Result = {}
    for reduced in (False, True):
        backend = make("llama", train_dtype="bfloat16", megatron={"grad_reduce_in_bf16": reduced})
        found: list[bool] = []

        def observed(*given: Any, backend: FsdpBackend = backend, found: list[bool] = found) -> Any:
            metrics = FsdpBackend.backward_pass(backend, *given)
            gradients = [local(p.grad) for _, p in backend.named_parameters if p.grad is not None]
            assert {x.dtype for x in gradients} == {torch.float32}
            found.append(all(torch.equal(x, x.bfloat16().float()) for x in gradients))
            return metrics

        backend.backward_pass = observed  # type: ignore[method-assign]
        result[f"reduced {reduced}"] = dict(
            metrics=[train(backend, make_samples())], in_bf16=found[0]
        )
    return result


def cpu_offload(
    make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int
) -> Result:
    """FSDP's offload of shards, on one rank slime's own; here everything is in CPU memory
    anyway.
    """
    backend = make("llama", train_dtype="bfloat16", fsdp_cpu_offload=True)
    metrics = [train(backend, make_samples()), train(backend, make_samples(seed=1))]
    return dict(metrics=metrics, weights=weights_of(backend), named=dict(backend.named_weights()))


def small_states(
    make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int
) -> Result:
    return _small_states(make, paths["output"] / f"small_{world_size}", "wide")


def small_states_of_experts(
    make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int
) -> Result:
    """The matrices of a layer's experts are one tensor, of which a rank has those of some
    experts.
    """
    return _small_states(make, paths["output"] / f"small_experts_{world_size}", "wide_experts")


def _small_states(make: Callable[..., FsdpBackend], folder: Path, model: str) -> Result:
    """Moments of 8 bits: two steps, a snapshot, a third step, and the same step after the snapshot
    was loaded.
    """
    if importlib.util.find_spec("torchao") is None:
        return {}
    flags = dict(optimizer_8bit=True)
    backend = make(model, **flags)
    metrics = [train(backend, make_samples()), train(backend, make_samples(seed=1))]
    backend.save(folder)
    saved = optimizer_state(backend)
    straight = train(backend, make_samples(seed=2))
    again = make(model, **flags)
    again.load(folder)
    loaded = optimizer_state(again)
    resumed = train(again, make_samples(seed=2))
    return dict(metrics=metrics, saved=saved, loaded=loaded, straight=straight, resumed=resumed)


def resume(make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int) -> Result:
    """Save after a step; what was saved is also read by one rank, later."""
    folder = paths["output"] / f"snapshot_{world_size}"
    flags = dict(keep_old_actor=True, lr_decay_style="linear", lr_warmup_iters=3)
    backend = make("llama", **flags)
    train(backend, make_samples())
    backend.copy_weights("actor", "old_actor")
    train(backend, make_samples(seed=1))
    backend.save(folder)
    saved = dict(saved_weights=weights_of(backend), saved_optimizer=optimizer_state(backend))
    straight = train(backend, make_samples(seed=2))
    weights = weights_of(backend)
    again = make("llama", **flags)
    again.load(folder)
    resumed = train(again, make_samples(seed=2))
    return saved | dict(
        straight=straight, resumed=resumed, weights=weights, resumed_weights=weights_of(again)
    )


def load_of_two_ranks(
    make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int
) -> Result:
    backend = make("llama", keep_old_actor=True, lr_decay_style="linear", lr_warmup_iters=3)
    backend.load(paths["output"] / "snapshot_2")
    result = dict(
        weights=weights_of(backend),
        optimizer=optimizer_state(backend),
        steps=backend.optimizer.steps,
    )
    return result | dict(next=train(backend, make_samples(seed=2)))


def hf_export(make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int) -> Result:
    backend = make("qwen3_moe")
    metrics = [train(backend, make_samples())]
    backend.save_hf(paths["output"] / f"hf_{world_size}")
    return dict(metrics=metrics, weights=weights_of(backend))


def names(make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int) -> Result:
    """Of every tensor that would go to the engines."""
    return {
        model: [name for name, _ in make(model).named_weights()]
        for model in ("qwen3_moe", "qwen2_5_vl")
    }


def collectives(
    make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int
) -> Result:
    """How many a weight sync takes, of how many tensors."""
    backend = make("qwen3_moe")
    with CountCollectives() as counter:
        tensors = {name: tensor.clone() for name, tensor in backend.named_weights()}
    parameters = {name: p.full_tensor() for name, p in backend.scorer.hf.named_parameters()}
    return {"calls": counter.calls, "parameters": len(parameters), "weights": tensors}


class CountCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.calls.append(func.__name__)
        return func(*args, **(kwargs or {}))


def reference_in_shards(
    make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int
) -> Result:
    """How much memory the weights of another reference take on this rank while they are loaded."""
    backend = make("llama", use_kl_loss=True)
    with LiveBytes() as peak, pytest.MonkeyPatch.context() as patch:
        load = fsdp_backend.load_full_model

        def watched(*args: Any, **kwargs: Any) -> Any:
            model = load(*args, **kwargs)  # reads in threads, which a dispatch mode does not see
            peak.watch(list(model.parameters()))
            return model

        patch.setattr(fsdp_backend, "load_full_model", watched)
        backend.load_copy("ref", str(paths["reference"]))
    sizes = [p.numel() * 4 for _, p in backend.named_parameters]
    log_probs = backend.log_probs(rank_batch(make_samples(), backend.rank, world_size), "ref")[
        "log_probs"
    ]
    return dict(peak=peak.most, whole=sum(sizes), largest=max(sizes), log_probs=log_probs)


class LiveBytes(TorchDispatchMode):
    """The most memory that tensors made inside had at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, weakref.ref[torch.Tensor]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.watch(
            [
                x
                for x in (out if isinstance(out, tuple | list) else [out])
                if isinstance(x, torch.Tensor)
            ]
        )
        return out

    def watch(self, tensors: list[torch.Tensor]) -> None:
        self.made |= {
            id(tensor): weakref.ref(tensor) for tensor in tensors if tensor.device.type != "meta"
        }
        alive = [tensor for ref in self.made.values() if (tensor := ref()) is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
        self.most = max(self.most, sum(storages.values()))


def nan_on_the_last_rank(
    make: Callable[..., FsdpBackend], paths: dict[str, Path], world_size: int
) -> Result:
    backend = make("llama")
    batch = rank_batch(make_samples(), backend.rank, world_size)
    batch["rewards"] = list(batch["rewards"])
    if backend.rank == world_size - 1:
        batch["rewards"][0] = float("nan")
    try:
        train_on_rollout(backend, batch)
    except NonFiniteError as error:
        return dict(message=str(error))
    return dict(message="no error")


PLAN: list[tuple[int, Callable[..., Result]]] = [
    (4, two_steps),
    (4, context_parallel),
    (4, ulysses),
    (4, forward_packs),
    (4, hf_export),
    (4, nan_on_the_last_rank),
    (2, two_steps),
    (2, context_parallel),
    (2, ulysses),
    (2, whole_sequences),
    (2, forward_packs),
    (2, checkpointed),
    (2, place_of_copies),
    (2, qwen3),
    (2, critic),
    (2, bfloat16),
    (2, cpu_offload),
    (2, small_states),
    (2, small_states_of_experts),
    (2, names),
    (2, reference_in_shards),
    (2, resume),
    (1, two_steps),
    (1, context_parallel),
    (1, ulysses),
    (1, whole_sequences),
    (1, forward_packs),
    (1, checkpointed),
    (1, qwen3),
    (1, critic),
    (1, reference_in_shards),
    (1, bfloat16),
    (2, bf16_sums),
    (1, cpu_offload),
    (1, small_states),
    (1, small_states_of_experts),
    (1, load_of_two_ranks),
    (1, hf_export),
    (2, collectives),
]


def worker(rank: int, paths: dict[str, Path], ports: dict[int, int]) -> None:
    """Entry of a spawned rank. Each world size is a process group of the first so many ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    results: dict[tuple[str, int], Result] = {}
    for world_size in (4, 2, 1):
        if rank >= world_size:
            break

        def make(
            model: str, role: str = "actor", world_size: int = world_size, **flags: Any
        ) -> FsdpBackend:
            args = make_args(paths[model], **flags)
            backend = create_backend(args, role, rank, world_size, "127.0.0.1", ports[world_size])
            assert isinstance(backend, FsdpBackend)
            return backend

        for size, scenario in PLAN:
            if size == world_size:
                results[scenario.__name__, world_size] = scenario(make, paths, world_size)
        dist.destroy_process_group()
    torch.save(results, paths["output"] / f"rank{rank}.pt")
