"""Every loss, correction and estimator over real gloo groups, two data-parallel by two
context-parallel ranks, against one rank that holds everything: value, gradient and metrics."""

from __future__ import annotations

import pytest
from loss_ranks import ADVANTAGE_CASES, LOSS_CASES, worker
from rank_processes import results_of_ranks

from slime.engines.process import free_port

pytestmark = [pytest.mark.real, pytest.mark.slow]
DEADLINE_SECONDS = 120.0
Errors = tuple[dict[str, float], dict[str, float]]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[Errors]:
    """Of every rank; one launch, ended also when one of them hangs."""
    output = tmp_path_factory.mktemp("ranks")
    return results_of_ranks(worker, (free_port(), str(output)), output, DEADLINE_SECONDS)


@pytest.mark.parametrize("case", LOSS_CASES)
def test_a_split_step_is_the_whole_step(errors: list[Errors], case: str) -> None:
    assert [losses[case] for losses, _ in errors] == pytest.approx([0.0] * 4, abs=1e-10)


@pytest.mark.parametrize("case", ADVANTAGE_CASES)
def test_advantages_do_not_depend_on_the_split(errors: list[Errors], case: str) -> None:
    assert [advantages[case] for _, advantages in errors] == pytest.approx([0.0] * 4, abs=1e-10)
