"""Every family over two ranks of context parallelism, against transformers on one rank."""

from __future__ import annotations

import pytest
import torch
from context_ranks import worker
from every_family import FAMILIES, save_tiny
from quick_processes import start_ranks

from slime.engines.process import free_port

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """By rank: what went wrong with each family."""
    root = tmp_path_factory.mktemp("context")
    folders = {family: save_tiny(family, root / family) for family in FAMILIES}
    start_ranks(worker, (free_port(), folders, root), 2, join=True)
    return [torch.load(root / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_what_one_does(ranks: list[dict[str, str]], family: str) -> None:
    for rank in range(2):
        assert not ranks[rank][family], ranks[rank][family]
