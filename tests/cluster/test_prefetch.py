"""The driver's side of asynchronous training, with a manager that generates when the test lets
it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster.prefetch import Prefetcher
from slime.cluster.ray_wait import ManagerClient, WaitExpired
from slime.cluster.rollout_manager import RolloutBatch


class Ref:
    """A result, which is computed when it is first asked for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.made: Future[Any] | None = None

    def future(self) -> Future[Any]:
        if self.made is None:
            self.made = made = Future()

            def compute() -> None:
                try:
                    made.set_result(self.call())
                except BaseException as error:
                    made.set_exception(error)

            threading.Thread(target=compute, daemon=True).start()
        return self.made

    def __call__(self) -> Any:
        return self.future().result()


class Manager:
    """Answers at once, but for rollouts, which wait until they are let go."""

    def __init__(self, in_flight: bool) -> None:
        self.in_flight, self.asked, self.told = in_flight, [], []
        self.go: dict[int, threading.Event] = {}
        self.fails = -1
        self.recorded, self.calls = threading.Event(), 0
        self.recorded.set()
        self.drained: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any) -> Ref:
            self.calls += 1
            return Ref(lambda: getattr(type(self), f"_{name}")(self, *given))

        return SimpleNamespace(remote=remote)

    def _generate(self, rollout_id: int) -> RolloutBatch:
        self.asked.append(rollout_id)
        assert self.go.setdefault(rollout_id, threading.Event()).wait(10)
        if rollout_id == self.fails:
            raise RuntimeError("the verifier is broken")
        return RolloutBatch([], {"id": float(rollout_id)})

    def _await_recorded(self, rollout_id: int) -> None:
        assert self.recorded.wait(10)

    def _open_pool(self, first: int, last: int, held: int) -> bool:
        return self.in_flight

    def _advance(self, step: int, taken: bool, trained: bool) -> None:
        self.told.append((step, taken, trained))

    def _drain_pool(self) -> None:
        self.drained()

    def let_go(self, rollout_id: int) -> None:
        self.go.setdefault(rollout_id, threading.Event()).set()


class Run:
    """The parts that the prefetcher gets, and what happened in which order."""

    def __init__(self, manager: Manager, timeout: float = 10.0, **settings: Any) -> None:
        self.actor_manager = manager
        self.timeout = timeout
        values = dict(
            async_buffer_size=1, update_weights_interval=1, max_weight_staleness=None, num_steps_per_rollout=None,
            update_weight_pause_mode="retract", replay_schedule=None,
        )  # fmt: skip
        self.args = SimpleNamespace(**(values | settings))
        self.clock = SimpleNamespace(step=0)
        self.pending: dict[str, float] = {}
        self.events: list[Any] = []
        self.notes: list[str] = []

    def prefetch(self) -> Prefetcher:
        waiter: Any = SimpleNamespace(get=lambda refs, *_, **__: [ref() for ref in refs])
        run: Any = SimpleNamespace(
            args=self.args,
            first_rollout=0,
            num_rollout=8,
            manager=ManagerClient(self.actor_manager, waiter, self.timeout),
            pool=self,
            snapshots=SimpleNamespace(save=lambda rollout_id: self.events.append(("save", rollout_id))),
            log=SimpleNamespace(
                note=self.notes.append, pending=self.pending, add_rollout=lambda batch: None,
                phase=lambda name: contextlib.nullcontext(),
            ),
            stop=SimpleNamespace(check=lambda: None),
        )  # fmt: skip
        run.evaluate, run.evaluation = self.evaluate, None

        def start_evaluation(step: int) -> None:
            self.events.append(("eval begins", step))
            run.evaluation = step

        def finish_evaluation() -> None:
            if run.evaluation is not None:
                self.events.append(("eval ends", run.evaluation))
                run.evaluation = None

        run.start_evaluation, run.finish_evaluation = start_evaluation, finish_evaluation
        return Prefetcher(run)

    def sync_recovered_engines(self, keep_version: bool = False) -> None:
        self.events.append(("recover", keep_version))

    def update_weights(self) -> None:
        self.events.append("update")
        self.clock.step += 1

    def evaluate(self, step: int) -> None:
        self.events.append(("eval", step))


@pytest.fixture(autouse=True)
def answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "get", lambda refs, timeout=None: [ref() for ref in refs])


def settled(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within a minute; then a moment more, in which too much may happen."""
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(0.03)
    return condition()


def events_of(run: Run) -> list[Any]:
    return [event for event in run.events if event[0] != "recover"]


def test_one_step_off_policy_generates_the_next_rollout_while_one_trains() -> None:
    manager = Manager(in_flight=False)
    run = Run(manager)
    for rollout_id in range(8):
        manager.let_go(rollout_id)
    with run.prefetch() as rollouts:
        assert run.notes == ["samples train at most 1 step(s) after the weights that sampled them"]
        for step in range(4):
            assert rollouts.next().metrics["id"] == step
            assert settled(lambda: manager.asked == list(range(step + 2))), manager.asked  # noqa: B023
            rollouts.update_weights()
    assert run.events.count("update") == 4
    assert manager.told == [(step, False, False) for step in (1, 2, 3, 4)], "the weights' versions"


def test_an_update_waits_for_the_rollout_under_way_and_none_starts_meanwhile() -> None:
    manager = Manager(in_flight=False)
    run = Run(manager, async_buffer_size=2)
    manager.let_go(0)
    with run.prefetch() as rollouts:
        rollouts.next()
        assert settled(lambda: manager.asked == [0, 1])
        updating = threading.Thread(target=rollouts.update_weights)
        updating.start()
        assert settled(lambda: updating.is_alive() and "update" not in run.events)
        manager.let_go(1)
        updating.join(10)
        assert "update" in run.events
        assert settled(lambda: manager.asked == [0, 1, 2])
        manager.let_go(2)


def test_a_pool_is_told_of_each_step_and_updates_go_through_it() -> None:
    manager = Manager(in_flight=True)
    run = Run(manager)
    manager.let_go(0)
    with run.prefetch() as rollouts:
        rollouts.next()
        assert settled(lambda: manager.asked == [0, 1])  # and rollout 1 stays under way
        rollouts.update_weights()
        assert run.events[-1] == "update"
        assert manager.told == [(0, True, False), (1, False, False), (1, False, True)], (
            "younger before there is room"
        )
        manager.let_go(1)


def test_an_evaluation_goes_on_beside_the_pool_and_ends_before_the_weights_change() -> None:
    manager = Manager(in_flight=True)
    run = Run(manager)
    for rollout_id in range(8):
        manager.let_go(rollout_id)
    with run.prefetch() as rollouts:
        rollouts.next()
        rollouts.update_weights()
        rollouts.evaluate(1)
        rollouts.next()
        assert events_of(run) == ["update", ("eval begins", 1)], "the next step trains meanwhile"
        rollouts.update_weights()
        rollouts.evaluate(2)
    assert events_of(run)[2:] == [("eval ends", 1), "update", ("eval begins", 2), ("eval ends", 2)]


def test_lost_engines_get_no_newer_weights_while_an_evaluation_goes_on() -> None:
    manager = Manager(in_flight=True)
    run = Run(manager)
    manager.let_go(0)
    with run.prefetch() as rollouts:
        rollouts.next()
        rollouts.update_weights()
        rollouts.evaluate(1)
        run.events.clear()
        threading.Timer(0.1, lambda: manager.let_go(1)).start()
        rollouts.next()
        assert ("recover", True) in run.events and ("recover", False) not in run.events


def test_the_bound_holds_back_and_the_wait_for_it_is_counted() -> None:
    """Without staleness nothing is generated while a step trains, whatever the buffer."""
    manager = Manager(in_flight=False)
    run = Run(manager, async_buffer_size=4, max_weight_staleness=0)
    for rollout_id in range(8):
        manager.let_go(rollout_id)
    with run.prefetch() as rollouts:
        for step in range(3):
            rollouts.next()
            assert settled(lambda: manager.asked == list(range(step + 1)))  # noqa: B023
            assert run.pending["perf/staleness_wait_time"] > 0
            rollouts.update_weights()
    free = Run(Manager(in_flight=False))
    free.actor_manager.let_go(0)
    with free.prefetch() as rollouts:
        rollouts.next()
        assert free.pending["perf/staleness_wait_time"] == 0.0


def test_an_error_of_the_generation_reaches_the_loop() -> None:
    manager = Manager(in_flight=False)
    manager.fails = 1
    manager.let_go(0), manager.let_go(1)
    with (
        Run(manager).prefetch() as rollouts,
        pytest.raises(RuntimeError, match="the verifier is broken"),
    ):
        rollouts.next()
        rollouts.next()


def test_a_rollout_that_takes_too_long_names_the_flag() -> None:
    """A manager that froze is a loss only after a WaitExpired."""
    said = r"waited 1 s \(deadline 1 s, --phase-timeout\) for rollout 0 to be generated"
    run = Run(Manager(in_flight=False), timeout=0.6)
    with run.prefetch() as rollouts, pytest.raises(WaitExpired, match=said):
        rollouts.next()


def test_in_drain_mode_an_update_waits_for_the_groups_of_the_pool() -> None:
    manager = Manager(in_flight=True)
    run = Run(manager, update_weight_pause_mode="drain")
    manager.drained = lambda: run.events.append("drained")
    manager.let_go(0)
    with run.prefetch() as rollouts:
        rollouts.next()
        rollouts.update_weights()
        assert events_of(run) == ["drained", "update"]
        manager.let_go(1)


@pytest.mark.parametrize(
    ("in_flight", "replays", "waits"), [(False, False, True), (True, False, False)]
)
def test_no_rollout_starts_between_a_snapshot_and_the_update_after_it(
    in_flight: bool, replays: bool, waits: bool
) -> None:
    """A resume with that snapshot makes them after the update, too. A standing pool is saved with
    its groups.
    """
    manager = Manager(in_flight)
    run = Run(manager, async_buffer_size=2, replay_schedule="schedule.jsonl" if replays else None)
    manager.let_go(0), manager.let_go(1)
    with run.prefetch() as rollouts:
        rollouts.next()
        assert settled(lambda: 1 in manager.asked)
        rollouts.next()
        assert settled(lambda: manager.asked[:3] == [0, 1, 2])
        manager.let_go(2)
        rollouts.save(1)
        assert rollouts.holding == waits
        rollouts.update_weights()
        assert events_of(run) == [("save", 1), "update"] and not rollouts.holding
        for rollout_id in range(3, 8):
            manager.let_go(rollout_id)


def test_after_the_end_of_a_replay_its_thread_calls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends while the thread waits for the recorded start of a rollout: a call of Ray that is shut
    down could crash the process.
    """
    import ray

    manager = Manager(in_flight=False)
    manager.recorded.clear()
    with Run(manager, replay_schedule="schedule.jsonl").prefetch() as rollouts:
        assert settled(lambda: manager.calls == 2), "open_pool and await_recorded"
        monkeypatch.setattr(ray, "get", lambda refs, timeout=None: pytest.fail("a call of Ray"))
    manager.recorded.set()
    rollouts.thread.join(10)
    assert not rollouts.thread.is_alive() and rollouts.error is None
    assert manager.calls == 2 and not manager.asked


def test_an_error_before_the_recorded_start_reaches_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the recording is broken")

    monkeypatch.setattr(Manager, "_await_recorded", broken)
    run = Run(Manager(in_flight=False), replay_schedule="schedule.jsonl")
    with run.prefetch() as rollouts, pytest.raises(RuntimeError, match="the recording is broken"):
        rollouts.next()
