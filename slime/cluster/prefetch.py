"""Generation that runs on while the trainer trains: how far ahead, and what an update and an evaluation wait for."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

from slime.cluster.wait import WaitExpired
from slime.rollout.admission import Admission

if TYPE_CHECKING:
    from slime.cluster.run import Run

POLL_SECONDS = 0.25


class Prefetcher:
    """Keeps rollouts finished or under way beside the one that trains; they train in their order.

    A thread of the driver asks the manager for one rollout after the other, so generation goes on while the main
    thread waits for a training step. How many may start is :class:`~slime.rollout.admission.Admission`'s matter.

    With the default rollout function an update waits until no rollout is under way, so none mixes versions. The fully
    asynchronous one has a standing pool of groups, which an update goes through: its engines are paused for as long
    as it takes, and the groups go on with the new weights. An evaluation runs beside that pool, and beside training
    steps; an update waits for it, so it is of one version.
    """

    def __init__(self, run: Run) -> None:
        args = run.args
        self.run = run
        self.replays = bool(args.replay_schedule)
        self.admission = Admission(
            1, args.async_buffer_size, args.update_weights_interval, args.max_weight_staleness, run.first_rollout
        )
        self.finished: deque[dict[str, Any]] = deque()
        self.in_flight = False  # whether a pool stands, which updates go through
        self.generating = False
        self.closed = False
        self.holding = False
        self.evaluation: tuple[int, Any] | None = None  # the step and the answer to come
        self.training = False  # a batch was taken, and its step is not over yet
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._work, name="prefetch", daemon=True)

    def __enter__(self) -> Prefetcher:
        run, bound = self.run, self.admission.bound
        optimizer = bound * (run.args.num_steps_per_rollout or 1)
        in_optimizer_steps = f" ({optimizer} optimizer steps)" if optimizer != bound else ""
        run.display.note(f"samples train at most {bound} step(s){in_optimizer_steps} after the weights that made them")
        opening = run.manager.open_pool.remote(run.first_rollout, run.num_rollout, run.held_step)
        self.in_flight = bool(run.manager_call([opening], "the rollout manager to open a pool"))
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._end_evaluation()
        finally:
            with self.changed:
                self.closed = True
                self.changed.notify_all()

    def _work(self) -> None:
        import ray

        try:
            for rollout_id in range(self.run.first_rollout, self.run.num_rollout):
                if self.replays and not self.in_flight:
                    ray.get(self.run.manager.await_recorded.remote(rollout_id), timeout=self.run.args.phase_timeout)
                with self.changed:
                    self.changed.wait_for(lambda: self.closed or (self.admission.room() > 0 and not self.holding))
                    if self.closed:
                        return
                    self.admission.admit()
                    self.generating = True
                batch = ray.get(self.run.manager.generate.remote(rollout_id), timeout=self.run.args.phase_timeout)
                with self.changed:
                    self.generating = False
                    self.finished.append(batch)
                    self.changed.notify_all()
        except BaseException as error:  # handed to the main thread, which raises it
            with self.changed:
                self.generating = False
                self.error = error
                self.changed.notify_all()

    def _wait(self, ready: Any, what: str) -> None:
        """Wait on the condition (held) in slices, so that signals and errors are seen."""
        started = time.monotonic()
        while not ready():
            if self.error is not None:
                raise self.error
            self.run.stop.check()
            self.run.faults.tend(keep_version=self.evaluation is not None)
            self._tell_version()  # lost engines may have got newer weights when they came back
            if time.monotonic() - started > self.run.args.phase_timeout:
                raise WaitExpired(f"waited {time.monotonic() - started:.0f} s for {what}")
            self.changed.wait(POLL_SECONDS)

    def next(self) -> dict[str, Any]:
        """The oldest finished rollout; the seconds waited for it count as ``rollout``.

        ``perf/staleness_wait_time`` are those in which more could not start because of its age.
        """
        self._let_go()
        self._step_is_over()
        held = self.admission.limited_by_staleness
        started = time.monotonic()
        with self.run.phase("rollout"), self.changed:
            self._wait(lambda: self.finished, "a finished rollout")
            batch = self.finished.popleft()
            self.admission.taken()
            self.training = True
            self.changed.notify_all()
        self.run.take_rollout(batch)
        self.run.pending["rollout/buffered"] = float(len(self.finished))
        self.run.pending["perf/staleness_wait_time"] = time.monotonic() - started if held else 0.0
        self._tell_pool(taken=True)
        return batch

    def _step_is_over(self) -> None:
        """What was taken is trained: more may start."""
        if not self.training:
            return
        self.training = False
        with self.changed:
            self.admission.trained()
            self.changed.notify_all()
        self._tell_pool(trained=True)

    # --- weights and evaluation --------------------------------------------------------------

    def save(self, rollout_id: int) -> None:
        """A snapshot, with the rollouts that are generated ahead: they are not made again. None starts between it and
        the update that follows, or the next step, so that a resume with a snapshot at an update repeats it exactly."""
        if not self.in_flight and not self.replays:
            self._hold()
        self.run.save(rollout_id)

    def update_weights(self) -> None:
        """Bring the new weights to the engines: beside the groups of a standing pool, else between two rollouts."""
        self._end_evaluation()
        if self.replays:
            recorded = self.run.manager.await_tokens.remote()
            self.run.manager_call([recorded], "the recorded tokens before the weight update")
        if not self.in_flight:
            self._hold()
        elif self.run.args.update_weight_pause_mode == "drain":
            self._drain_pool()
        try:
            self.run.update_weights()
            self._tell_version()
            self._step_is_over()
        finally:
            self._let_go()

    def evaluate(self, step: int) -> None:
        """Evaluate the engines' weights. Beside a standing pool and the next training step, until the next update."""
        if self.in_flight:
            self._end_evaluation()
            self.evaluation = step, self.run.start_evaluation(step)
            return
        self._hold()
        try:
            self.run.evaluate(step)
        finally:
            self._let_go()

    def _end_evaluation(self) -> None:
        if self.evaluation is not None:
            self.run.end_evaluation(*self.evaluation)
            self.evaluation = None

    def _hold(self) -> None:
        """Wait until no rollout is under way, and start none until :meth:`_let_go`."""
        with self.changed:
            self.holding = True
            with self.run.phase("drain"):
                self._wait(
                    lambda: not self.generating,
                    "the rollout under way to finish before the weights change or are saved",
                )

    def _drain_pool(self) -> None:
        with self.run.phase("drain"):
            drained = self.run.manager.drain_pool.remote()
            self.run.manager_call(
                [drained], "the groups under way to finish before the weights change", meanwhile=self.run.faults.tend
            )

    def _let_go(self) -> None:
        with self.changed:
            self.holding = False
            self.changed.notify_all()

    def _tell_version(self) -> None:
        """The engines' weights are newer: what starts from now on is younger."""
        if self.run.held_step > self.admission.version:
            with self.changed:
                self.admission.version_changed(self.run.held_step)
                self.changed.notify_all()
            reached = self.run.manager.weights_are_of.remote(self.run.held_step)
            self.run.manager_call([reached], "the rollout manager to note the weights")
            self._tell_pool()

    def _tell_pool(self, taken: bool = False, trained: bool = False) -> None:
        if self.in_flight:
            told = self.run.manager.advance_pool.remote(self.run.held_step, taken, trained)
            self.run.manager_call([told], "the rollout manager to start more groups")
