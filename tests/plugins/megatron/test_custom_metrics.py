"""Losses other than the policy's: metrics that not all ranks have, and the temperature of
fine-tuning.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fsdp_helpers import make_backend
from launch import run_ranks
from megatron_ranks import Layout, make_arguments, rank_batch, results_of
from tiny_families import save_family

pytestmark = [pytest.mark.megatron, pytest.mark.real]


def test_a_metric_that_one_rank_has_is_that_of_the_step(tmp_path: Path) -> None:
    paths = {"llama": save_family("llama", tmp_path / "llama"), "output": tmp_path}
    flags = dict(
        loss_type="custom_loss", custom_loss_function_path="user_hooks.loss_with_metric_of_some"
    )
    layout = Layout("llama", 2, {}, flags)
    run_ranks("megatron_ranks:worker", 2, paths, [layout], seconds=120)
    args = make_arguments(layout, paths, "fsdp")
    whole = results_of(make_backend(args), args, lambda seed, zero: rank_batch(seed, zero, 0, 1))[
        "metrics"
    ]
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)[layout.name]
        assert "error" not in found, found["error"]
        for ours, theirs in zip(found["metrics"], whole, strict=True):
            for name in ("train/loss", "train/of_group_0"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5)


def test_fine_tuning_has_no_temperature(tmp_path: Path) -> None:
    paths = {"llama": save_family("llama", tmp_path / "llama"), "output": tmp_path}
    flags = dict(loss_type="sft_loss", compute_advantages_and_returns=False)
    layout = Layout("llama", 1, {}, {**flags, "rollout_temperature": 0.6})
    run_ranks("megatron_ranks:worker", 1, paths, [layout], seconds=120)
    found = torch.load(tmp_path / "rank0.pt", weights_only=False)[layout.name]
    assert "error" not in found, found["error"]
    args = make_arguments(
        Layout("llama", 1, {}, {**flags, "rollout_temperature": 1.0}), paths, "fsdp"
    )
    plain = results_of(make_backend(args), args, lambda seed, zero: rank_batch(seed, zero, 0, 1))[
        "metrics"
    ]
    for ours, theirs in zip(found["metrics"], plain, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-5)
