"""A weight decay that changes during the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import run_ranks
from tiny_families import save_family

pytestmark = [pytest.mark.megatron, pytest.mark.real]


def test_it_grows_over_the_whole_run_also_if_the_learning_rate_decays_earlier(tmp_path: Path) -> None:
    flags = dict(num_rollout=8, lr_decay_style="linear", lr_decay_iters=2)
    path = save_family("llama", tmp_path / "model")
    run_ranks("schedule_ranks:weight_decays", 1, path, flags, tmp_path / "found.pt", seconds=120)
    assert torch.load(tmp_path / "found.pt") == pytest.approx([step / 8 for step in range(8)])
