"""Generation that is ended so that a run can go back to a snapshot."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from slime.cluster import generation
from slime.cluster.generation import GarbageCollection, Generation, GenerationEnded
from slime.cluster.ray_wait import WaitExpired
from slime.engines.background import run


def test_calls_in_progress_end_with_their_last_words() -> None:
    generation, begun, said = Generation(), threading.Event(), list[str]()

    async def forever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            said.append("groups returned")

    def rollout() -> None:
        with generation.call():
            try:
                run(forever())
            except CancelledError:
                said.append("cancelled")

    thread = threading.Thread(target=rollout)
    thread.start()
    begun.wait()
    generation.end()
    assert said == ["groups returned", "cancelled"]
    thread.join()
    with pytest.raises(GenerationEnded), generation.call():
        pass
    generation.begin()
    with generation.call():
        assert run(asyncio.sleep(0, "next")) == "next"


def test_a_call_that_blocks_its_thread_is_not_waited_for_without_end() -> None:
    generation, begun, release = Generation(), threading.Event(), threading.Event()

    def stubborn() -> None:
        with generation.call():
            begun.set()
            release.wait()

    thread = threading.Thread(target=stubborn)
    thread.start()
    begun.wait()
    with pytest.raises(WaitExpired, match="generation in progress"):
        generation.end(0.05)
    release.set()
    thread.join()


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
    monkeypatch.setattr(generation, "time", clock)
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


def test_what_came_to_live_since_counts_too_and_once_though_no_look_at_all_is_due(
    clock: Clock,
) -> None:
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
