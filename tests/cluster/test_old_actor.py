"""``--keep-old-actor``: the copy that scores a rollout holds the weights that made it, however fast
either side is.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_args import make_args, rule_problems
from needs import of_all

from slime.cluster.trainer import OldActor
from slime.config.args import Args
from slime.config.rollout import FULLY_ASYNC_FUNCTION, is_fully_async, old_actor_lag
from slime.rollout.admission import Admission


class Copies:
    """A training group that has numbers for weights: how many steps have trained them."""

    def __init__(self) -> None:
        self.weights = {"actor": 0, "old_actor": 0}

    def copy_weights(self, source: str, target: str) -> None:
        self.weights[target] = self.weights[source]


@dataclass
class Snapshot:
    """The part of a snapshot that this test needs."""

    manifest: Any
    weights: dict[str, int]
    ahead: list[int]  # the weights that made each rollout ahead of training


class Loop:
    """The order of events of ``train_async.py``, with seconds that are only numbers: one rollout
    after the other is made while steps are trained; an update waits for the rollout under way, and
    none starts meanwhile."""

    def __init__(self, args: Args, making: list[float], snapshot: Snapshot | None = None) -> None:
        self.args, self.making = args, making
        self.actor = Copies()
        self.first = 0 if snapshot is None else snapshot.manifest["rollout_id"] + 1
        self.old = OldActor.from_args(args, True, None if snapshot is None else snapshot.manifest)
        self.restored: list[int] = []
        if snapshot is not None:
            self.actor.weights, self.restored = dict(snapshot.weights), list(snapshot.ahead)
        self.now, self.busy_until, self.holding = 0.0, None, False
        self.made_with: list[int] = []  # of the rollouts from ``first`` on
        self.finished = 0
        self.snapshots: list[Snapshot] = []

    now: float
    busy_until: float | None

    def start(self) -> None:
        free = self.busy_until is None and not self.holding and self.admission.room() > 0
        if free and self.first + len(self.made_with) < len(self.making):
            self.admission.admit()
            if len(self.made_with) < len(self.restored):  # it need not be made again
                self.busy_until = self.now
                self.made_with.append(self.restored[len(self.made_with)])
                return
            self.busy_until = self.now + self.making[self.first + len(self.made_with)]
            self.made_with.append(self.admission.version)

    def pass_until(self, end: float) -> None:
        while self.busy_until is not None and self.busy_until <= end:
            self.now, self.busy_until = self.busy_until, None
            self.finished += 1
            self.start()
        self.now = end

    def hold(self) -> None:
        self.holding = True
        self.pass_until(self.now if self.busy_until is None else self.busy_until)

    def update(self, step: int) -> None:
        """Send the weights after ``step`` steps."""
        model, held = self.old.to_send(step)
        assert self.actor.weights[model] == held
        self.old.updated(self.actor, f"0.{held}")
        self.held = held

    def save(self, step: int) -> None:
        """Write a snapshot after ``step`` steps; what is under way is lost."""
        ahead = self.made_with[step - self.first : self.finished]
        manifest = {"rollout_id": step - 1, "old_actor": self.old.facts(len(ahead))}
        self.snapshots.append(Snapshot(manifest, dict(self.actor.weights), ahead))

    def run(self, training: list[float]) -> list[tuple[int, int]]:
        """For each step the weights that made its rollout, and those that score it."""
        found = []
        args = self.args
        self.update(self.first)
        self.admission = Admission(
            1, args.async_buffer_size, args.update_weights_interval, args.max_weight_staleness, self.first,
            version=self.held,
        )  # fmt: skip
        self.start()
        for step in range(self.first, len(training)):
            while self.finished <= step - self.first:
                assert self.busy_until is not None, "nothing is made"
                self.pass_until(self.busy_until)
            self.admission.taken()
            self.start()
            self.old.before_step(self.actor)
            found.append((self.made_with[step - self.first], self.actor.weights["old_actor"]))
            self.pass_until(self.now + training[step])
            self.actor.weights["actor"] = step + 1
            self.save(step + 1)  # at a stop
            self.hold()
            self.save(step + 1)
            self.holding = False
            if (step + 1) % args.update_weights_interval == 0:
                self.hold()
                self.update(step + 1)
                self.admission.version_changed(step + 1)
                self.holding = False
                self.save(step + 1)  # at a stop
            self.admission.trained()
            self.start()
        return found


def arguments(buffered: int, interval: int, bound: int | None, **more: object) -> Args:
    return make_args(
        keep_old_actor=True, async_buffer_size=buffered, update_weights_interval=interval, max_weight_staleness=bound,
        **more,
    )  # fmt: skip


SECONDS = st.lists(st.sampled_from([0.1, 1.0, 5.0]), min_size=9, max_size=9)


def lag_of(args: Args) -> int | None:
    return old_actor_lag(args, args.update_weights_interval, is_fully_async(args))


def problems_of(args: Args) -> list[str]:
    problems = rule_problems(args, asynchronous=True)
    return [problem for problem in problems if "--keep-old-actor" in problem]


@settings(max_examples=of_all(200, 50), deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.booleans(), SECONDS, SECONDS)
def test_the_old_actor_made_the_samples_also_after_a_resume(
    buffered: int,
    interval: int,
    more: int,
    bounded: bool,
    making: list[float],
    training: list[float],
) -> None:
    args = arguments(buffered, interval, interval - 1 + more if bounded else None)
    if lag_of(args) is None:
        assert problems_of(args)
        return
    assert problems_of(args) == []
    whole = Loop(args, making)
    made_with, scored_with = zip(*whole.run(training), strict=True)
    assert scored_with == made_with
    for snapshot in whole.snapshots:
        resumed = Loop(args, making, snapshot)
        for made, scored in resumed.run(training):
            assert scored == made
        for later in resumed.snapshots[::4]:
            for made, scored in Loop(args, making, later).run(training):
                assert scored == made


@pytest.mark.parametrize(
    ("buffered", "interval", "bound", "in_flight", "lag"),
    [
        (1, 1, None, False, 1),
        (1, 1, 0, False, 0),
        (1, 2, None, False, 1),
        (1, 2, 1, False, 0),
        (3, 2, 2, False, 1),
        (2, 1, None, False, None),
        (3, 2, 3, False, None),
        (1, 1, None, True, None),
        (1, 1, 0, True, 0),
        (4, 2, 1, True, 0),
    ],
)
def test_lag(
    buffered: int, interval: int, bound: int | None, in_flight: bool, lag: int | None
) -> None:
    function = {"rollout_function_path": FULLY_ASYNC_FUNCTION} if in_flight else {}
    args = arguments(buffered, interval, bound, **function)
    assert lag_of(args) == lag
    problems = problems_of(args)
    assert len(problems) == (lag is None)
    if lag is None:
        # What the messages advise.
        fixed = [arguments(buffered, interval, interval - 1, **function)]
        if not in_flight:
            fixed += [arguments(1, interval, bound), arguments(buffered, interval, interval)]
        for args in fixed:
            assert lag_of(args) is not None and problems_of(args) == []


def test_in_train_py_each_update_is_followed() -> None:
    actor = Copies()
    old = OldActor.from_args(arguments(1, 1, None), asynchronous=False)
    for step in range(4):
        old.updated(actor, f"0.{step}")
        old.updated(actor, f"0.{step}")  # sent again to engines that were lost
        old.before_step(actor)
        assert actor.weights["old_actor"] == step
        actor.weights["actor"] += 1


def test_a_run_without_engines_keeps_the_copy() -> None:
    """``--debug-train-only`` makes no update."""
    actor = Copies()
    old = OldActor.from_args(arguments(1, 2, None), asynchronous=True)
    for _ in range(3):
        old.before_step(actor)
        actor.weights["actor"] += 1
    assert actor.weights["old_actor"] == 0


def test_a_run_that_resumes_from_the_synchronous_loop() -> None:
    """Its old actor made the last rollout before the snapshot; what is trained next is made with
    the loaded weights.
    """
    actor = Copies()
    actor.weights.update(actor=7, old_actor=6)
    OldActor.from_args(SimpleNamespace(**vars(arguments(1, 1, None))), asynchronous=True).updated(
        actor, "1.7"
    )
    assert actor.weights["old_actor"] == 7
