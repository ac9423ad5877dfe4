"""How often the driver calls Ray while it waits, whatever the number of ranks; and ranks that say
nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ray

from slime.cluster.ray_wait import POLLED_ACTORS, NoStatus, Waiter, WaitExpired
from slime.cluster.stop_signals import StopSignals


class Answer:
    """A reference that is ready from one turn of the clock on."""

    def __init__(self, at: float, value: Any = None) -> None:
        self.at, self.value = at, value


class FakeRay:
    """Counts calls; every wait that has to wait is one turn of the clock."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.turn, self.calls = 0, 0
        patch.setattr(ray, "wait", self.wait)
        patch.setattr(ray, "get", self.get)

    def wait(
        self, refs: Sequence[Answer], num_returns: int = 1, timeout: float = 0.0
    ) -> tuple[list[Answer], Any]:
        self.calls += 1
        ready = [ref for ref in refs if ref.at <= self.turn][:num_returns]
        if len(ready) < num_returns and timeout:
            self.turn += 1
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        self.calls += 1
        return [ref.value for ref in refs] if isinstance(refs, list) else refs.value


class FakeActor:
    """Answers ``status()`` after a number of turns that the test may change."""

    def __init__(self, clock: FakeRay, delay: float = 0.0) -> None:
        self.clock, self.delay, self.asked = clock, delay, 0

    @property
    def status(self) -> Any:
        return self

    def remote(self) -> Answer:
        self.asked += 1
        return Answer(self.clock.turn + self.delay, {"phase": "train"})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


@pytest.mark.parametrize("turns", [0, 20])
def test_calls_do_not_grow_with_the_number_of_ranks(clock: FakeRay, turns: int) -> None:
    counts, questions = [], []
    for ranks in (8, 512):
        actors = {f"rank {i}": FakeActor(clock) for i in range(ranks)}
        refs = [Answer(clock.turn + (turns if i % 2 else 0), i) for i in range(ranks)]
        before = clock.calls
        assert Waiter(StopSignals()).get(refs, "ranks", 600, actors=actors) == list(range(ranks))
        counts.append(clock.calls - before)
        questions.append(sum(actor.asked for actor in actors.values()))
    status_answers = turns * POLLED_ACTORS
    assert counts[1] <= 3 * turns + 3 + status_answers
    assert questions[1] <= status_answers + POLLED_ACTORS
    if not turns:
        assert counts == [3, 3] and questions == [0, 0]


def test_every_rank_is_asked_in_turn(clock: FakeRay) -> None:
    actors = {f"rank {i}": FakeActor(clock) for i in range(3 * POLLED_ACTORS)}
    Waiter(StopSignals()).get([Answer(7)], "ranks", 600, actors=actors)
    assert min(actor.asked for actor in actors.values()) >= 1


def monotonic(patch: pytest.MonkeyPatch, step: float) -> Callable[[], float]:
    ticks = itertools.count()
    clock = lambda: next(ticks) * step  # noqa: E731
    patch.setattr("slime.cluster.ray_wait.time.monotonic", clock)
    return clock


def test_a_rank_that_stops_answering_ends_the_wait(
    clock: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monotonic(monkeypatch, 1.0)
    actors = {"rank 0": FakeActor(clock), "rank 1": FakeActor(clock)}
    waiter = Waiter(StopSignals(), silence=100.0)
    waiter.get([Answer(5)], "to load", 10_000, actors=actors)
    actors["rank 1"].delay = float("inf")
    with pytest.raises(NoStatus, match=r"^rank 1.*100 s \(--status-timeout"):
        waiter.get([Answer(float("inf"))], "to train", 10_000, actors=actors)


def test_a_rank_that_never_answered_is_still_being_started(
    clock: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monotonic(monkeypatch, 1.0)
    actors = {"rank 0": FakeActor(clock, delay=float("inf"))}
    with pytest.raises(WaitExpired, match=r"deadline 5000 s, --phase-timeout\)") as raised:
        Waiter(StopSignals(), silence=100.0).get(
            [Answer(float("inf"))], "to load", 5000, actors=actors
        )
    assert not isinstance(raised.value, NoStatus)
    with pytest.raises(WaitExpired, match="50 s, --start-timeout"):
        Waiter(StopSignals()).get(
            [Answer(float("inf"))], "to load", 50, actors=actors, flag="--start-timeout"
        )


def test_an_answer_that_came_while_nobody_looked_counts(
    clock: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver was busy, or stopped, for longer than the limit."""
    now = [0.0]
    monkeypatch.setattr("slime.cluster.ray_wait.time.monotonic", lambda: now[0])
    actors = {f"rank {i}": FakeActor(clock) for i in range(2 * POLLED_ACTORS)}
    waiter = Waiter(StopSignals(), silence=100.0)
    waiter.get([Answer(9)], "to load", 10_000, actors=actors)
    now[0] = 1000.0
    waiter.get([Answer(clock.turn + 9)], "to train", 10_000, actors=actors)
