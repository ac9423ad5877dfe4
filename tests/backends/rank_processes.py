"""Four ranks as processes of their own, and the models that they train."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fsdp_helpers import save_tiny_llama, save_tiny_qwen2_5_vl, save_tiny_qwen3, save_tiny_qwen3_moe
from quick_processes import start_ranks

RANKS = 4


def results_of_ranks(
    worker: Callable[..., None], args: tuple[Any, ...], output: Path, seconds: float
) -> list[Any]:
    """Run ``worker(rank, *args)`` once for each rank, and load the ``rank<i>.pt`` that each writes
    below ``output``.

    The ranks are ended also when one of them hangs, after ``seconds``.
    """
    context = start_ranks(worker, args, RANKS)
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=max(deadline - time.monotonic(), 0.1)):
            assert time.monotonic() < deadline, f"ranks did not finish in {seconds:.0f} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
                process.join(10)
    return [torch.load(output / f"rank{rank}.pt", weights_only=False) for rank in range(RANKS)]


def save_models(root: Path) -> dict[str, Path]:
    """A tiny model of each kind below ``root``, and the folder ``output`` for results, by name."""
    (root / "output").mkdir()
    return {
        "llama": save_tiny_llama(root / "llama"),
        "wide": save_tiny_llama(
            root / "wide", hidden_size=128, intermediate_size=192, initializer_range=0.05
        ),
        "wide_experts": save_tiny_qwen3_moe(
            root / "wide_experts", hidden_size=128, moe_intermediate_size=64
        ),
        "reference": save_tiny_llama(root / "reference", seed=5),
        "qwen3": save_tiny_qwen3(root / "qwen3"),
        "qwen3_moe": save_tiny_qwen3_moe(root / "qwen3_moe"),
        "qwen2_5_vl": save_tiny_qwen2_5_vl(root / "qwen2_5_vl"),
        "output": root / "output",
    }
