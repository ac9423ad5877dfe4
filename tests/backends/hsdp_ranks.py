"""What the ranks of ``test_fsdp_hsdp.py`` run: replicas of shards, and how often FSDP
communicates.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_helpers import make_args, make_samples, weights_of
from fsdp_ranks import optimizer_state, rank_batch, train
from torch.utils._python_dispatch import TorchDispatchMode

from slime.backends.collectives import local
from slime.backends.create import create_backend
from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.train_loop import Parts, part_of, train_early_part, train_on_rollout

Result = dict[str, Any]
MICRO_BATCHES = 3
HYBRID = {"fsdp_shard_size": 2}
ACCUMULATE = {"fsdp_accumulate_unsharded_gradients": True}
KEEP = {"fsdp_reshard_after_forward": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "flat": {},
    "hybrid": HYBRID,
    "replicas_of_one": {"fsdp_shard_size": 1},
    "hybrid_accumulate_keep": HYBRID | ACCUMULATE | KEEP,
}
PARTS = [("flat", False), ("hybrid", True), ("hybrid_accumulate_keep", False)]
"""What trains in parts, with the mean of samples or of tokens."""
READERS = {"flat": ["hybrid"], "hybrid": ["hybrid", "replicas_of_one"], "async": ["flat"]}
"""Which layouts read the snapshot of each."""
SAVED = dict(keep_old_actor=True, lr_decay_style="linear", lr_warmup_iters=3)


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Rank:
    def __init__(self, rank: int, world_size: int, paths: dict[str, Path], port: int) -> None:
        self.rank, self.world_size, self.paths, self.port = rank, world_size, paths, port

    def make(self, model: str, role: str = "actor", **flags: Any) -> FsdpBackend:
        args = make_args(self.paths[model], **flags)
        backend = create_backend(args, role, self.rank, self.world_size, "127.0.0.1", self.port)
        assert isinstance(backend, FsdpBackend)
        return backend


def samples(seed: int = 0) -> list[dict[str, Any]]:
    return make_samples(groups=4 * MICRO_BATCHES, seed=seed)


def held(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    """This rank's parts of parameters and moments."""
    state = dict(backend.named_parameters) | backend.optimizer.tensors()
    return {name: local(tensor.detach()).clone() for name, tensor in state.items()}


def several_steps(ranks: Rank, **flags: Any) -> Result:
    """GRPO with a reference of other weights; log-prob passes between the steps, whose parameters
    must not go stale.
    """
    reference = dict(kl_coef=0.01, kl_loss_type="k3", ref_load=str(ranks.paths["reference"]))
    backend = ranks.make("llama", **reference, **flags)
    metrics, log_probs = [], []
    for step in range(2):
        metrics.append(train(backend, samples(step)))
        batch = rank_batch(samples(9), backend.data_parallel_rank, backend.data_parallel_size)
        for model in ("ref", "actor"):
            log_probs += backend.log_probs(batch, model)["log_probs"]
    batch = rank_batch(samples(3), backend.rank, backend.world_size)
    batch["advantages"] = [torch.ones(n) for n in batch["response_lengths"]]
    batch["log_probs"] = batch["ref_log_probs"] = backend.log_probs(batch)["log_probs"]
    before = (weights_of(backend), held(backend), optimizer_state(backend))
    with Collectives() as collectives:
        metrics.append(backend.train_step(batch, 0))
    backend.sleep()
    backend.wake()
    after = weights_of(backend)
    return dict(
        metrics=metrics,
        log_probs=log_probs,
        weights=before[0],
        held=before[1],
        optimizer=before[2],
        next_weights=after,
        counts=dict(collectives.counts),
        placement=(backend.data_parallel_rank, backend.data_parallel_size),
    )


def in_parts(ranks: Rank, early: int | None, **flags: Any) -> Result:
    """Two steps of three parts each, of which ``early`` are trained before the whole rollout is
    there; None: in one piece. Two groups have no advantage, so that ranks lack samples of a part.
    """
    parts = 1 if early is None else MICRO_BATCHES
    backend = ranks.make("llama", train_during_rollout=parts, **flags)
    metrics = []
    for step in range(2):
        everyone = make_samples(groups=4 * MICRO_BATCHES, seed=step, zero_groups=2)
        batch = rank_batch(everyone, backend.data_parallel_rank, backend.data_parallel_size)
        done = Parts() if early else None
        if early is not None:
            count = len(batch["micro_batch_indices"]) // parts
            batch["num_microbatches"] = [count] * parts
            batch["global_batch_sizes"] = batch["global_batch_sizes"] * parts
            batch["global_token_counts"] = [batch["global_token_counts"][0] / parts] * parts
            for number in range(early):
                assert done is not None
                train_early_part(backend, part_of(batch, number), done)
        metrics.append(train_on_rollout(backend, batch, parts=done)[0])
    return dict(metrics=metrics, weights=weights_of(backend))


def others(ranks: Rank, **flags: Any) -> dict[str, Result]:
    """Roles, dtypes and layouts that have a mesh of their own."""
    found: dict[str, Result] = {}
    critic = ranks.make("llama", role="critic", advantage_estimator="ppo", **flags)
    found["critic"] = dict(
        metrics=[train(critic, samples(step)) for step in range(2)], weights=held_whole(critic)
    )
    pairs = ranks.make("qwen3", megatron={"context_parallel_size": 2}, **flags)
    found["context_parallel"] = dict(
        metrics=[train(pairs, samples(s)) for s in range(2)], weights=weights_of(pairs)
    )
    narrow = ranks.make("llama", train_dtype="bfloat16", **flags)
    found["bfloat16"] = dict(
        metrics=[train(narrow, samples(step)) for step in range(2)], weights=weights_of(narrow)
    )
    moe = ranks.make("qwen3_moe", **flags)
    found["moe"] = dict(metrics=[train(moe, samples())], weights=weights_of(moe))
    moe.save_hf(ranks.paths["output"] / f"hf_{flags.get('fsdp_shard_size', 4)}")
    vision = ranks.make("qwen2_5_vl", **flags)
    found["vision"] = dict(metrics=[], weights=weights_of(vision))
    return found


def held_whole(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for n, p in backend.named_parameters
    }


def state_of(backend: FsdpBackend) -> Result:
    with backend.bank.using("old_actor"):
        copy = weights_of(backend)
    return dict(weights=weights_of(backend), copy=copy, optimizer=optimizer_state(backend))


def saved(ranks: Rank, name: str, **flags: Any) -> Result:
    """A snapshot with a copy of the weights that has been moved, and what comes next in the run
    that wrote it.
    """
    backend = ranks.make("llama", **SAVED, **flags)
    train(backend, samples())
    backend.copy_weights("actor", "old_actor")
    train(backend, samples(1))
    backend.save(ranks.paths["output"] / name)
    if backend.saving is not None:
        backend.saving.finish(60)
    return state_of(backend) | dict(next=train(backend, samples(2)))


def loaded(ranks: Rank, name: str, **flags: Any) -> Result:
    backend = ranks.make("llama", **SAVED, **flags)
    backend.load(ranks.paths["output"] / name)
    return state_of(backend) | dict(next=train(backend, samples(2)))


def four_ranks(ranks: Rank) -> Result:
    results: Result = {name: several_steps(ranks, **flags) for name, flags in VARIANTS.items()}
    for name, per_token in PARTS:
        flags = VARIANTS[name] | {"calculate_per_token_loss": per_token}
        results[f"parts_{name}_{per_token}"] = [
            in_parts(ranks, early, **flags) for early in (None, 0, 2)
        ]
    results |= {"others_flat": others(ranks), "others_hybrid": others(ranks, **HYBRID)}
    for name, flags in ("flat", {}), ("hybrid", HYBRID), ("async", HYBRID | {"async_save": True}):
        results[f"saved_{name}"] = saved(ranks, f"snapshot_{name}", **flags)
    for name in ("flat", "hybrid", "async"):
        for reader in READERS[name]:
            results[f"loaded_{name}_by_{reader}"] = loaded(
                ranks, f"snapshot_{name}", **VARIANTS[reader]
            )
    return results


def two_ranks(ranks: Rank) -> Result:
    results = {
        "loaded_hybrid_by_two": loaded(ranks, "snapshot_hybrid"),
        "saved_two": saved(ranks, "snapshot_two"),
    }
    return results | {
        "loaded_hybrid_by_two_replicas": loaded(ranks, "snapshot_hybrid", fsdp_shard_size=1)
    }


def worker(rank: int, paths: dict[str, Path], ports: list[int]) -> None:
    """Entry of a spawned rank. Two ranks read what four wrote, and four what these two wrote."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    results = four_ranks(Rank(rank, 4, paths, ports[0]))
    dist.destroy_process_group()
    if rank < 2:
        results |= two_ranks(Rank(rank, 2, paths, ports[1]))
        dist.destroy_process_group()
    results["loaded_two_by_hybrid"] = loaded(
        Rank(rank, 4, paths, ports[2]), "snapshot_two", **HYBRID
    )
    dist.destroy_process_group()
    torch.save(results, paths["output"] / f"rank{rank}.pt")
