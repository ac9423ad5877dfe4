"""What the ranks of ``test_fsdp_lora_ranks.py`` run: a trainer of an adapter in several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_helpers import make_args, make_samples, weights_of
from fsdp_ranks import rank_batch, train

from slime.backends.collectives import local
from slime.backends.create import create_backend
from slime.backends.fsdp.backend import FsdpBackend

Result = dict[str, Any]
LORA: dict[str, Any] = dict(
    lora_rank=3, lora_alpha=6.0, use_rslora=False, lora_target_modules=["all-linear"]
)
FLAGS: dict[str, dict[str, Any]] = {
    "plain": dict(use_kl_loss=True, kl_loss_coef=0.1, keep_old_actor=True),
    "replicas": dict(fsdp_shard_size=1, lora_sync="adapter"),
    "context": dict(megatron={"context_parallel_size": 2}, advantage_estimator="gspo"),
    "recomputed": dict(gradient_checkpointing=True, share_prompt_in_pack=False),
    "bfloat16": dict(train_dtype="bfloat16", use_kl_loss=True, kl_loss_coef=0.1),
    "critic": dict(advantage_estimator="ppo"),
    "experts": dict(
        lora_target_modules=["all-linear", "experts"], use_kl_loss=True, kl_loss_coef=0.1
    ),
}
MODELS = {"experts": "qwen3_moe"}  # of other layouts: qwen3


def random_factors(backend: FsdpBackend) -> None:
    """The same for every number of ranks."""
    assert backend.adapter is not None
    generator = torch.Generator().manual_seed(5)
    for _, p in backend.adapter.trained:
        whole = torch.randn(p.shape, generator=generator) * 0.1
        if hasattr(p, "device_mesh"):
            from slime.backends.bank import shard_of

            whole = shard_of(whole, p)
        local(p.detach()).copy_(whole)


def scores(backend: FsdpBackend, tag: Any) -> list[torch.Tensor]:
    batch = rank_batch(make_samples(), backend.data_parallel_rank, backend.data_parallel_size)
    return backend.log_probs(batch, tag)["log_probs"]


def run(rank: int, world_size: int, paths: dict[str, Path], port: int, layout: str) -> Result:
    def make(**flags: Any) -> FsdpBackend:
        size = {"megatron": {"context_parallel_size": world_size}} if layout == "context" else {}
        args = make_args(
            paths[MODELS.get(layout, "qwen3")], **({"lora_sync": "merged"} | flags | size)
        )
        role = "critic" if layout == "critic" else "actor"
        backend = create_backend(args, role, rank, world_size, "127.0.0.1", port)
        assert isinstance(backend, FsdpBackend)
        return backend

    flags = FLAGS[layout]
    if "fsdp_shard_size" in flags and world_size == 1:
        flags = {name: value for name, value in flags.items() if name != "fsdp_shard_size"}
    backend = make(**(LORA | flags))
    random_factors(backend)
    result: Result = {}
    if layout in ("plain", "bfloat16"):
        result["ref"] = scores(backend, "ref")
        kept = {name: value for name, value in flags.items() if name == "train_dtype"}
        result["separate"] = scores(make(**kept), "actor")
    metrics = [train(backend, make_samples()), train(backend, make_samples(seed=3, zero_groups=2))]
    result |= dict(metrics=metrics, dtypes={str(p.dtype) for _, p in backend.adapter.base})  # type: ignore[union-attr]
    result["trained"] = {n: _whole(p) for n, p in backend.adapter.trained}  # type: ignore[union-attr]
    result["identity"] = backend.adapter.identity()  # type: ignore[union-attr]
    if layout != "critic":
        result["weights"] = weights_of(backend)
        backend.save_hf(paths["output"] / f"{layout}_{world_size}")
    if layout == "plain":
        backend.save(paths["output"] / f"snapshot_{world_size}")
        result["next"] = train(backend, make_samples(seed=4))
        again = make(**LORA, **flags, lora_sync="adapter")
        again.load(paths["output"] / f"snapshot_{world_size}")
        result["resumed"] = train(again, make_samples(seed=4))
        result |= sent_alone(again)
    return result


def sent_alone(backend: FsdpBackend) -> Result:
    """What a sync sends to engines that have the base, and what ranks agree on if the last or none
    needs the base.
    """
    source = backend.adapter_source()
    assert source is not None
    asked = [source.any_rank(backend.rank == backend.world_size - 1), source.any_rank(False)]
    return {"alone": dict(source.factors), "sent": dict(backend.named_weights()), "asked": asked}


def _whole(p: Any) -> torch.Tensor:
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()


def worker(rank: int, paths: dict[str, Path], ports: dict[int, int]) -> None:
    torch.set_num_threads(1)
    results: dict[tuple[str, int], Result] = {}
    for world_size in (2, 1):
        if rank >= world_size:
            continue
        for layout in FLAGS:
            results[layout, world_size] = run(rank, world_size, paths, ports[world_size], layout)
        dist.destroy_process_group()
    torch.save(results, paths["output"] / f"rank{rank}.pt")
