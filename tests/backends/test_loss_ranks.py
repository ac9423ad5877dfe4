"""Every loss, correction and estimator over real gloo groups, two data-parallel by two context-parallel ranks,
against one rank that holds everything: value, gradient and metrics."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from loss_ranks import ADVANTAGE_CASES, LOSS_CASES, worker

from slime.engines.process import free_port

pytestmark = pytest.mark.real
DEADLINE_SECONDS = 120.0
Errors = tuple[dict[str, float], dict[str, float]]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[Errors]:
    """Of every rank; one launch, ended also when one of them hangs."""
    output = tmp_path_factory.mktemp("ranks")
    context = mp.spawn(worker, args=(free_port(), str(output)), nprocs=4, join=False)
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while not context.join(timeout=max(deadline - time.monotonic(), 0.1)):
            assert time.monotonic() < deadline, f"ranks did not finish in {DEADLINE_SECONDS:.0f} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
                process.join(10)
    return [torch.load(Path(output) / f"rank{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize("case", LOSS_CASES)
def test_a_split_step_is_the_whole_step(errors: list[Errors], case: str) -> None:
    assert [losses[case] for losses, _ in errors] == pytest.approx([0.0] * 4, abs=1e-10)


@pytest.mark.parametrize("case", ADVANTAGE_CASES)
def test_advantages_do_not_depend_on_the_split(errors: list[Errors], case: str) -> None:
    assert [advantages[case] for _, advantages in errors] == pytest.approx([0.0] * 4, abs=1e-10)
