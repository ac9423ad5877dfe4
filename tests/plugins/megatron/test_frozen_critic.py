"""Flags that freeze parameters are for actor and critic, so they may name the output that a critic
does not have.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_helpers import make_backend
from launch import run_ranks
from megatron_ranks import PP, Layout, make_arguments, rank_batch, results_of
from tiny_families import save_family

pytestmark = [pytest.mark.megatron, pytest.mark.real]

FLAGS: list[dict[str, Any]] = [
    dict(freeze_params_name_list=("lm_head",)),
    dict(only_train_params_name_list=("lm_head",)),
    dict(freeze_params_name_list=(r"^model\.",)),
]
LAYOUTS = [
    Layout("glm4", world, {PP: world}, dict(advantage_estimator="ppo", **flags), role="critic")
    for flags in FLAGS
    for world in (1, 2)
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("critic")
    return {"glm4": save_family("glm4", folder / "glm4"), "output": folder}


@pytest.fixture(scope="module")
def ranks(paths: dict[str, Path]) -> list[Any]:
    run_ranks("megatron_ranks:worker", 2, paths, LAYOUTS, seconds=300)
    return [torch.load(paths["output"] / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_critic_is_trained_as_with_fsdp(
    layout: Layout, ranks: list[Any], paths: dict[str, Path]
) -> None:
    """Also where the stage that lacks the critic's head trains nothing."""
    args = make_arguments(layout, paths, "fsdp")
    theirs = results_of(
        make_backend(args, "critic"), args, lambda seed, zero: rank_batch(seed, zero, 0, 1)
    )
    for rank in range(layout.world):
        mine = ranks[rank][layout.name]
        assert "error" not in mine, mine["error"]
        for ours, expected in zip(mine["metrics"], theirs["metrics"], strict=True):
            for name in ("train/critic-loss", "train/critic-grad_norm"):
                assert math.isclose(ours[name], expected[name], rel_tol=1e-5), (name, rank)
