"""What changes during a run: learning rate and weight decay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import run_ranks
from tiny_families import save_family

pytestmark = [pytest.mark.megatron, pytest.mark.real]


def test_weight_decay_grows_over_the_whole_run_also_if_the_learning_rate_decays_earlier(
    tmp_path: Path,
) -> None:
    flags = dict(num_rollout=8, lr_decay_style="linear", lr_decay_iters=2)
    path = save_family("llama", tmp_path / "model")
    run_ranks("schedule_ranks:weight_decays", 1, path, flags, tmp_path / "found.pt", seconds=120)
    assert torch.load(tmp_path / "found.pt") == pytest.approx([step / 8 for step in range(8)])


def test_the_learning_rate_goes_on_after_a_snapshot_without_optimizer(tmp_path: Path) -> None:
    """With --no-save-optim. It starts again only if the run that resumes asks for it."""
    path = save_family("llama", tmp_path / "model")
    run_ranks("schedule_ranks:learning_rates", 1, path, tmp_path, seconds=120)
    first, resumed, *again = torch.load(tmp_path / "found.pt")
    assert first == pytest.approx([1.0, 0.9, 0.8]) and resumed == pytest.approx([0.7, 0.6, 0.5])
    assert again == [first, first]
