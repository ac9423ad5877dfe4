"""Weights on their way out: the same tensors in few collectives as in many."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gathering_ranks import LAYOUTS
from launch import run_ranks
from tiny_families import save_family

from slime.weights.hf_folder import HfFolder

pytestmark = pytest.mark.megatron


def test_batches_of_any_size_give_the_checkpoint_in_few_collectives(tmp_path: Path) -> None:
    path = save_family("qwen3_moe", tmp_path / "model")
    run_ranks("gathering_ranks:gather", 2, path, tmp_path, seconds=300)
    folder = HfFolder(str(path))
    for rank in range(2):
        for layout, (batched, halfway, single) in zip(
            LAYOUTS, torch.load(tmp_path / f"rank{rank}.pt"), strict=True
        ):
            for found in (batched, halfway, single):
                assert list(found["tensors"]) and len(found["tensors"]) > 50
                for name, tensor in found["tensors"].items():
                    assert torch.equal(tensor, folder.get(name).to(tensor.dtype)), (layout, name)
            counts = [found["collectives"] for found in (batched, halfway, single)]
            assert counts == sorted(counts) and 2 * counts[0] <= counts[2], (layout, counts)
