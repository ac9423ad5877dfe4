"""Gradients in bf16 that become float32 a piece at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks
from tiny_families import save_family

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("megatron", [{}, {"expert_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}])
def test_pieces_give_what_all_at_once_gives(megatron: dict[str, Any], tmp_path: Path) -> None:
    path = save_family("qwen3_moe", tmp_path / "model")
    run_ranks("streamed_ranks:compare", 2, path, megatron, seconds=300)
