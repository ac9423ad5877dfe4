"""Ranks as processes of this machine: their results, and the message when one fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slime.plugins.tools.local_ranks import Place, RankError, run_ranks


def place_and_environment(place: Place, argument: str) -> tuple[int, int, str, str]:
    return place.rank, place.world_size, argument, os.environ["OMP_NUM_THREADS"] + os.environ["OWN"]


def one_fails(place: Place, argument: str) -> None:
    if place.rank == 1:
        raise ValueError(f"no {argument} here")
    time.sleep(600)


def refuses(place: Place, argument: str) -> None:
    raise RankError(f"this model has no {argument}: use another one")


def never_ends(place: Place, argument: str) -> None:
    time.sleep(600)


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    )


@pytest.mark.real
def test_results_come_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    name = f"{__name__}:place_and_environment"
    found = run_ranks(name, 2, "given", tmp_path / "new", threads=3, variables={"OWN": "x"})
    assert found == [(0, 2, "given", "3x"), (1, 2, "given", "3x")]


@pytest.mark.real
def test_a_rank_that_fails_is_named_and_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match=r"rank 1 of 2 failed \(exit code 1\)(.|\n)*no checkpoint here"
    ):
        run_ranks(f"{__name__}:one_fails", 2, "checkpoint", tmp_path)


@pytest.mark.real
def test_a_refusal_of_slime_comes_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(f"{__name__}:refuses", 2, "layers", tmp_path)
    assert str(error.value) == "this model has no layers: use another one"


@pytest.mark.real
def test_a_rank_that_hangs_is_ended_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1 did.*0\.5 s"):
        run_ranks(f"{__name__}:never_ends", 1, "", tmp_path, seconds=0.5)
