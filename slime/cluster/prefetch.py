"""Generate ahead of training, a bounded number of rollouts."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from slime.cluster.wait import WaitExpired

if TYPE_CHECKING:
    from slime.cluster.run import Run

POLL_SECONDS = 0.25


def staleness_bound(buffer_size: int, update_interval: int) -> int:
    """Steps between the weights that made a sample and the step that trains on it, at most.

    Rollout ``i`` starts no earlier than step ``i - buffer_size`` begins, with weights that are at
    most ``update_interval - 1`` steps old by then.
    """
    return buffer_size + update_interval - 1


class Prefetcher:
    """Keeps at most ``--async-buffer-size`` finished rollouts waiting; they train in their order.

    A thread of the driver asks the manager for one rollout after the other, so generation goes on
    while the main thread waits for a training step.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.capacity = run.args.async_buffer_size
        self.finished: deque[dict[str, Any]] = deque()
        self.generating = False
        self.closed = False
        self.holding = False
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._work, name="prefetch", daemon=True)

    def __enter__(self) -> Prefetcher:
        bound = staleness_bound(self.capacity, self.run.args.update_weights_interval)
        self.run.display.note(f"samples train at most {bound} step(s) after the weights that made them")
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _work(self) -> None:
        import ray

        try:
            for rollout_id in range(self.run.first_rollout, self.run.num_rollout):
                with self.changed:
                    self.changed.wait_for(lambda: self.closed or (self._has_room() and not self.holding))
                    if self.closed:
                        return
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

    def _has_room(self) -> bool:
        return len(self.finished) < self.capacity

    def _wait(self, ready: Any, what: str) -> None:
        """Wait on the condition (held) in slices, so that signals and errors are seen."""
        waited = 0.0
        while not ready():
            if self.error is not None:
                raise self.error
            self.run.stop.check()
            self.run.faults.tend()
            if waited > self.run.args.phase_timeout:
                raise WaitExpired(f"waited {waited:.0f} s for {what}")
            self.changed.wait(POLL_SECONDS)
            waited += POLL_SECONDS

    def next(self) -> dict[str, Any]:
        """The oldest finished rollout; the seconds waited for it count as ``rollout``."""
        with self.run.phase("rollout"), self.changed:
            self._wait(lambda: self.finished, "a finished rollout")
            batch = self.finished.popleft()
            self.changed.notify_all()
        self.run.take_rollout(batch)
        self.run.pending["rollout/buffered"] = float(len(self.finished))
        return batch

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No rollout is under way inside, so that none mixes weight versions."""
        with self.changed:
            self.holding = True
            with self.run.phase("drain"):
                self._wait(lambda: not self.generating, "the rollout under way to finish before the weight update")
        try:
            yield
        finally:
            with self.changed:
                self.holding = False
                self.changed.notify_all()
