"""Megatron on one GPU: its attention, grouped experts and optimizer there, against FSDP on the CPU in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_helpers import make_args, make_backend
from megatron_ranks import rank_batch
from tiny_families import save_family

from slime.backends.train_loop import train_on_rollout
from slime.engines.process import free_port

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def on_gpu(path: Path, **changes: Any) -> Any:
    from slime.backends.create import create_backend

    args = make_args(path, train_backend="megatron", world_size=1, **changes)
    args.megatron = {}
    return create_backend(args, "actor", 0, 1, "127.0.0.1", free_port("127.0.0.1"))


def one_step(backend: Any) -> tuple[list[torch.Tensor], dict[str, float]]:
    scores = backend.log_probs(rank_batch(0, 0, 0, 1), temperature=1.0)["log_probs"]
    return scores, train_on_rollout(backend, backend.args, rank_batch(0, 0, 0, 1))[0]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize(("dtype", "fused"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_gpu_and_cpu_agree(family: str, dtype: str, fused: bool, tmp_path: Path) -> None:
    """float32 goes through padded attention and one product per expert, bfloat16 through varlen attention and
    ``grouped_mm``; ``fused`` compiles norms, rotation and activations."""
    path = save_family(family, tmp_path / family)
    expected, metrics = one_step(make_backend(make_args(path)))
    backend = on_gpu(path, train_dtype=dtype, compile_layers=fused)
    scores, found = one_step(backend)
    # In bfloat16 a token may go to another expert; most must agree all the same.
    gaps = torch.cat([(a - b).abs() for a, b in zip(scores, expected, strict=True)])
    assert float(gaps.median()) < (1e-3 if dtype == "float32" else 0.1)
    assert found["train/grad_norm"] == pytest.approx(
        metrics["train/grad_norm"], rel=1e-2 if dtype == "float32" else 0.5
    )
    before = {name: tensor.cpu().clone() for name, tensor in backend.named_weights()}
    held = torch.cuda.memory_allocated()
    backend.sleep()
    assert torch.cuda.memory_allocated() < held
    backend.wake()
    for name, tensor in backend.named_weights():
        assert torch.equal(tensor.cpu(), before[name]), name
    again = train_on_rollout(backend, backend.args, rank_batch(1, 0, 0, 1))[0]
    assert again["train/grad_norm"] > 0
