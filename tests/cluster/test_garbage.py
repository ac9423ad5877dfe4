"""When cyclic garbage is looked for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from slime.cluster import garbage
from slime.cluster.garbage import GarbageCollection


class Node:
    def __init__(self) -> None:
        self.self = self


class Clock:
    """CPU seconds; each look at it takes one."""

    now = 0.0

    def process_time(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    thresholds = gc.get_threshold()
    clock = Clock()
    monkeypatch.setattr(garbage, "time", clock)
    yield clock
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def old_cycle() -> weakref.ref[Node]:
    """Garbage that only a look at everything finds."""
    node = Node()
    gc.collect()
    return weakref.ref(node)


def test_all_is_looked_at_when_it_is_due_and_not_before(clock: Clock) -> None:
    collection = GarbageCollection()
    first = old_cycle()
    collection.collect()  # the first is always due
    assert first() is None
    second = old_cycle()
    collection.collect()  # took 1 s; two seconds later it would be half of the time
    clock.now += 16.0
    collection.collect()
    assert second() is not None
    clock.now += 16.0
    collection.collect()
    assert second() is None


def test_young_objects_are_looked_at_when_as_many_were_made_as_live(clock: Clock) -> None:
    collection = GarbageCollection()
    collection.collect()
    few = gc.get_threshold()
    alive = [[] for _ in range(200_000)]  # type: ignore[var-annotated]
    clock.now += 100.0
    collection.collect()
    young, middle, old = gc.get_threshold()
    assert few[0] == 100_000 and young >= 2 * len(alive)
    assert middle == 20 and old == 1 << 30  # never all by itself


def test_what_came_to_live_since_counts_too_and_once_though_no_look_at_all_is_due(clock: Clock) -> None:
    collection = GarbageCollection()
    collection.collect()
    alive = [[] for _ in range(150_000)]  # type: ignore[var-annotated]  # young ones are looked at meanwhile
    collection.collect()
    young = gc.get_threshold()[0]
    for _ in range(30):
        collection.collect()
    assert 2 * len(alive) <= young and gc.get_threshold()[0] < 1.1 * young


def test_what_was_there_before_is_never_looked_at(clock: Clock) -> None:
    before = Node()
    seen = weakref.ref(before)
    collection = GarbageCollection()
    del before
    collection.collect()
    assert seen() is not None
