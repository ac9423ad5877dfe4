"""Gradients that become float32 a piece at a time, for main parameters on their own device or in
CPU memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks
from tiny_families import save_family

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    "megatron",
    [
        {"tensor_model_parallel_size": 2},
        {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 0.5,
            "expert_model_parallel_size": 2,
        },
    ],
)
def test_pieces_give_what_all_at_once_gives(megatron: dict[str, Any], tmp_path: Path) -> None:
    """With ``--optimizer-cpu-offload``: what the optimizer without it gives."""
    path = save_family("qwen3_moe", tmp_path / "model")
    run_ranks("streamed_ranks:compare", 2, path, megatron, seconds=300)


def test_a_share_of_the_main_parameters_moves(tmp_path: Path) -> None:
    run_ranks(
        "streamed_ranks:moved_shares", 1, save_family("qwen3", tmp_path / "model"), seconds=300
    )
