"""Generation during training: how far ahead it may run, and what weight updates and evaluations
wait for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.cluster.actors import door
from slime.cluster.ray_wait import POLL_SECONDS, T, WaitExpired
from slime.cluster.rollout_manager import RolloutBatch, RolloutManager
from slime.rollout.admission import Admission

if TYPE_CHECKING:
    from slime.cluster.phases import Run


@dataclass
class Prefetcher:
    """Generates rollouts ahead of the one that trains; they are trained in the order of their ids.

    A thread of the driver requests one rollout after the other from the manager, so generation
    continues while the main thread waits for a training step.
    :class:`~slime.rollout.admission.Admission` decides how many may start.

    With the default rollout function, an update waits until no rollout is in progress, so that no
    rollout mixes weights. The fully asynchronous rollout function has a standing pool of groups,
    for which an update does not wait: the engines pause during the update, and the groups continue
    with the new weights. An evaluation then runs beside the pool and the training steps. The next
    update waits for it, because an evaluation measures one weight version.

    Who waits for whom, always through the condition ``changed`` (an arrow points from what ends a
    wait to the wait)::

        prefetch thread                                   main thread
        waits for room, and for no hold  <-- _step_is_over (more room), _let_go (end of a hold)
        waits for the manager: a rollout
        appends it to ``finished``       -->  next() waits for a finished rollout
        ``generating`` becomes False     -->  _hold() waits before weights change or are saved
        stores an error                  -->  every wait raises it

    Attributes:
        run: Whose rollouts are generated; a signal to it ends every wait of the main thread.
        in_flight: Whether there is a standing pool, whose groups continue through an update.
        generating: Whether the thread waits for a rollout from the manager.
        holding: Whether the main thread keeps new rollouts from starting.
        training: Whether a rollout was taken whose step is not complete yet.
        error: An error of the thread.
    """

    run: Run
    in_flight: bool = False
    generating: bool = False
    closed: bool = False
    holding: bool = False
    training: bool = False
    error: BaseException | None = None

    def __post_init__(self) -> None:
        run = self.run
        args = run.args
        self.finished = deque[RolloutBatch]()
        self.changed = threading.Condition()
        self.rollouts = range(run.first_rollout, run.num_rollout)
        self.admission = Admission(
            batch=1,
            buffer_size=args.async_buffer_size,
            update_interval=args.update_weights_interval,
            max_staleness=args.max_weight_staleness,
            first_step=run.first_rollout,
            version=run.pool.clock.step,
        )
        # whether a recorded schedule decides when rollouts start
        self.replays = args.replay_schedule
        self.thread = threading.Thread(target=self._work, name="prefetch", daemon=True)

    def __enter__(self) -> Prefetcher:
        run = self.run
        bound = self.admission.bound
        optimizer = bound * (run.args.num_steps_per_rollout or 1)
        steps = f"{bound} step(s)"
        if optimizer != bound:
            steps += f" ({optimizer} optimizer steps)"
        run.log.note(f"samples train at most {steps} after the weights that sampled them")
        self.in_flight = run.manager.call(
            "the rollout manager to open a pool",
            RolloutManager.open_pool,
            self.rollouts.start,
            self.rollouts.stop,
            run.pool.clock.step,
        )
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # After an error, the engines or the manager may be gone, so the result of the
            # evaluation is given up.
            if kind is None:
                self.run.finish_evaluation()
        finally:
            # The thread is a daemon and is not joined: it may be waiting for a rollout that nobody
            # needs any more.
            with self.changed:
                self.closed = True
                self.changed.notify_all()

    def _work(self) -> None:
        changed = self.changed
        try:
            # Not with the driver's Waiter: signals and the progress display belong to the main
            # thread.
            for rollout_id in self.rollouts:
                # A replay starts each rollout under the recorded weights. A standing pool does that
                # for its groups.
                if self.replays and not self.in_flight:
                    self._answer(RolloutManager.await_recorded, rollout_id, "start as recorded")
                with changed:
                    changed.wait_for(
                        lambda: self.closed or (self.admission.room() > 0 and not self.holding)
                    )
                    # Under the lock that the wait above has taken again, so that _hold cannot miss
                    # this rollout.
                    self.admission.admit()
                    self.generating = True
                batch = self._answer(RolloutManager.generate, rollout_id, "be generated")
                if batch is None:
                    return
                with changed:
                    self.finished.append(batch)
                    self.generating = False
                    changed.notify_all()
        except BaseException as error:  # The main thread raises it in its next wait.
            with changed:
                self.generating = False
                self.error = error
                changed.notify_all()

    def _answer(
        self, method: Callable[[RolloutManager, int], T], rollout_id: int, what: str
    ) -> T | None:
        """Ask the manager, and return its answer; None after the end of the ``with`` block.

        Then the run may go on from a snapshot, with another prefetcher, or shut Ray down, and a
        call of Ray meanwhile can crash this process. So nothing is called after it, and the thread
        does not wait within such a call.
        """
        manager = self.run.manager
        limit = manager.timeout
        with self.changed:
            if self.closed:
                return None
            asked = manager.start(method, rollout_id)
            answer = asked.future()
        if wait([answer], limit).not_done:
            raise WaitExpired(
                f"waited {limit:.0f} s (deadline {limit:.0f} s, --phase-timeout) for rollout "
                f"{rollout_id} to {what}"
            )
        with self.changed:
            return None if self.closed else door().get([asked])[0]

    def _wait(self, ready: Callable[[], object], what: str) -> None:
        """Wait until ``ready()`` is true; the caller holds the condition.

        The wait is cut into short slices. Between them, it looks for signals, an error of the
        thread, and engines that were restarted and need weights.
        """
        run = self.run
        started = time.monotonic()
        while not ready():
            if self.error is not None:
                raise self.error
            run.stop.check()
            run.pool.sync_recovered_engines(keep_version=run.evaluation is not None)
            # If the trainer has moved on since the last update, a recovered engine causes an update
            # of all engines.
            self._announce_version()
            waited = time.monotonic() - started
            limit = run.manager.timeout
            if waited > limit:
                raise WaitExpired(
                    f"waited {waited:.0f} s (deadline {limit:.0f} s, --phase-timeout) for {what}"
                )
            self.changed.wait(POLL_SECONDS)

    def next(self) -> RolloutBatch:
        """Wait for the oldest finished rollout; the time counts as phase ``rollout``.

        ``perf/staleness_wait_time`` is the time of this wait if the staleness bound kept further
        rollouts from starting, otherwise 0.
        """
        # The previous step ends here if no weight update ended it: save() may have left a hold.
        self._let_go()
        self._step_is_over()
        bounded = self.admission.limited_by_staleness
        started = time.monotonic()
        with self.run.log.phase("rollout"), self.changed:
            self._wait(lambda: self.finished, "a finished rollout")
            batch = self.finished.popleft()
            self.admission.taken()
            self.training = True
            self.changed.notify_all()
        log = self.run.log
        log.add_rollout(batch)
        log.pending["rollout/buffered"] = float(len(self.finished))
        waited = time.monotonic() - started
        log.pending["perf/staleness_wait_time"] = waited if bounded else 0.0
        if self.in_flight:
            self._tell_manager(taken=True)
        return batch

    def _step_is_over(self) -> None:
        """Note that the step of the rollout taken last is complete, so more rollouts may start."""
        if not self.training:
            return
        self.training = False
        with self.changed:
            self.admission.trained()
            self.changed.notify_all()
        if self.in_flight:
            self._tell_manager(trained=True)

    # --- weights and evaluation --------------------------------------------------------------

    def save(self, rollout_id: int) -> None:
        """Write a snapshot, including the rollouts that were generated ahead: a resumed run trains
        these.

        No rollout starts between the snapshot and the update that follows it (or the next step).
        Otherwise that rollout would have old weights here, but new ones in a run that resumes from
        the snapshot.
        """
        # A standing pool continues, since its snapshot is the state after the newest complete
        # rollout. In a replay, the recording decides when a rollout starts.
        if not self.in_flight and not self.replays:
            self._hold()
        self.run.snapshots.save(rollout_id)

    def update_weights(self) -> None:
        """Send the new weights to the engines, between two rollouts or in the middle of a standing
        pool's groups.
        """
        run = self.run
        run.finish_evaluation()
        # In a replay, the update must not come before the recorded number of tokens was generated
        # with the old weights.
        if self.replays:
            run.manager.call(
                "the recorded tokens before the weight update", RolloutManager.await_tokens
            )
        if not self.in_flight:
            self._hold()
        elif run.args.update_weight_pause_mode == "drain":
            with run.log.phase("drain"):
                run.manager.wait(
                    run.manager.start(RolloutManager.drain_pool),
                    "the groups in progress to finish",
                    meanwhile=run.pool.sync_recovered_engines,
                )
        try:
            run.pool.update_weights()
            # The version first: _step_is_over makes room, and what starts then must count for the
            # new weights.
            self._announce_version()
            self._step_is_over()
        finally:
            self._let_go()

    def evaluate(self, step: int) -> None:
        """Evaluate the engines' weights.

        With a standing pool, this only starts the evaluation: it runs during the next steps, and
        the next update waits for it.
        """
        if self.in_flight:
            self.run.finish_evaluation()
            self.run.start_evaluation(step)
            return
        self._hold()
        try:
            self.run.evaluate(step)
        finally:
            self._let_go()

    def _hold(self) -> None:
        """Wait until no rollout is in progress, and let none start before :meth:`_let_go`."""
        with self.changed:
            self.holding = True  # before the wait, or the thread could start rollouts forever
            with self.run.log.phase("drain"):
                self._wait(
                    lambda: not self.generating,
                    "the current rollout to finish before the weights change or are saved",
                )

    def _let_go(self) -> None:
        with self.changed:
            self.holding = False
            self.changed.notify_all()

    def _announce_version(self) -> None:
        """Tell the admission and the manager if the engines hold newer weights: samples started now
        are less stale.
        """
        step = self.run.pool.clock.step
        if step > self.admission.version:
            with self.changed:
                self.admission.version_changed(step)
                self.changed.notify_all()
            self._tell_manager()

    def _tell_manager(self, taken: bool = False, trained: bool = False) -> None:
        self.run.manager.call(
            "the rollout manager to note how far training is",
            RolloutManager.advance,
            self.run.pool.clock.step,
            taken,
            trained,
        )
