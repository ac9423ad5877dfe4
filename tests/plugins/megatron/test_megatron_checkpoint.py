"""Checkpoints with their optimizer: bit for bit on the same layout; torch_dist goes on the same way
on another.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import CASES, Case
from launch import run_ranks
from tiny_families import save_family

pytestmark = [pytest.mark.megatron, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("checkpoints")
    paths: dict[str, Path] = {
        name: save_family(name, folder / name) for name in {case.saved.model for case in CASES}
    }
    paths["output"] = folder / "output"
    paths["output"].mkdir()
    run_ranks("checkpoint_ranks:worker", 2, paths)
    return [torch.load(paths["output"] / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


PAIRS = [(number, i) for number, case in enumerate(CASES) for i in range(len(case.readers))]


@pytest.mark.more
@pytest.mark.parametrize(
    ("number", "i"),
    PAIRS,
    ids=[f"{CASES[n].saved.name} read by {CASES[n].readers[i].name}" for n, i in PAIRS],
)
def test_training_goes_on(number: int, i: int, ranks: list[Any]) -> None:
    case: Case = CASES[number]
    exact = case.readers[i] == case.saved
    for rank in range(2):
        straight, read = ranks[rank][number]
        resumed = read[i]
        assert "error" not in resumed, resumed["error"]
        for ours, theirs in zip(resumed["metrics"], straight["metrics"], strict=True):
            assert ours["train/lr-pg_0"] == theirs["train/lr-pg_0"] > 0
            for name in ("train/loss", "train/grad_norm"):
                assert math.isclose(
                    ours[name],
                    theirs[name],
                    rel_tol=0 if exact else 2e-6,
                    abs_tol=0 if exact else 1e-7,
                )
        for name, tensor in straight["weights"].items():
            torch.testing.assert_close(
                resumed["weights"][name], tensor, rtol=0, atol=0 if exact else 1e-5
            )
        for name, tensor in straight["sent"].items():
            torch.testing.assert_close(
                resumed["sent"][name], tensor, rtol=0, atol=0 if exact else 1e-5
            )
        assert any(
            not torch.equal(tensor, straight["weights"][name])
            for name, tensor in straight["sent"].items()
        )
        for ours, theirs in zip(resumed["old"], straight["old"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_files_of_ranks_are_for_their_own_layout(ranks: list[Any]) -> None:
    _, (other, same) = ranks[0][len(CASES)]
    assert "--ckpt-format torch in another layout: tp 2 (here 1), pp 1 (here 2)" in other["error"]
    assert "error" not in same  # what a folder holds is in it: the flag says only how to write
