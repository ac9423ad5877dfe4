"""The base is gathered only if some rank must send it; all ranks decide alike."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slime.weights.settings import AdapterSource
from slime.weights.stream import WeightSource

Named = tuple[str, torch.Tensor]


class Ranks:
    """Two ranks, which notice if one of them iterates something else."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=10)
        self.asked: dict[int, bool] = {}
        self.taken: dict[int, list[str]] = {0: [], 1: []}

    def source(self, rank: int) -> WeightSource:
        def stream(names: list[str]) -> Iterator[Named]:
            for name in names:
                self.barrier.wait()  # stands for a collective operation, which the other rank must join
                self.taken[rank].append(name)
                yield name, torch.ones(1)

        def any_rank(value: bool) -> bool:
            self.asked[rank] = value
            self.barrier.wait()
            return any(self.asked.values())

        return WeightSource(stream(["base", "factor"]), AdapterSource(stream(["factor"]), any_rank))


@pytest.mark.parametrize("needs", [(False, False), (False, True), (True, True)])
def test_all_ranks_iterate_the_same(needs: tuple[bool, bool]) -> None:
    ranks = Ranks()

    def work(rank: int) -> None:
        source = ranks.source(rank)
        next(source.start(needs[rank]))
        source.finish()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert ranks.taken[0] == ranks.taken[1] == (["base", "factor"] if any(needs) else ["factor"])


def test_a_rank_that_fails_before_it_starts_still_takes_part() -> None:
    """A sender that reaches no engine raises an error, and the other ranks must not wait for it."""
    ranks = Ranks()
    with ThreadPoolExecutor(2) as pool:
        failed = pool.submit(ranks.source(0).finish)
        well = pool.submit(lambda source: list(source.start(True)), ranks.source(1))
        failed.result()
        assert len(well.result()) == 2
    assert ranks.taken[0] == ["base", "factor"]


def test_ranks_that_could_not_meet_do_not_try_again() -> None:
    asked: list[bool] = []

    def lost(value: bool) -> bool:
        asked.append(value)
        raise RuntimeError("a rank was lost")

    source = WeightSource(iter([("weight", torch.ones(1))]), AdapterSource((), lost))
    with pytest.raises(RuntimeError, match="a rank was lost"):
        source.start(base=True)
    source.finish()
    assert asked == [True]


def test_there_is_one_stream_without_an_adapter() -> None:
    source = WeightSource(iter([("weight", torch.ones(1)), ("bias", torch.ones(1))]), None)
    assert next(source.start(base=False))[0] == "weight"
    source.finish()
