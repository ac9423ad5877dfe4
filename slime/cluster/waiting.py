"""Wait for Ray work: with a name, a deadline, a live status, and an end as soon as one rank fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from slime.cluster.wait import WaitExpired


class StopRequested(Exception):
    """Ctrl-C or SIGTERM came; the run ends in order."""


class StopSignals:
    """Turn the first SIGINT or SIGTERM into a wish that waits look at; the second ends at once."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self.ending = False  # the wish is being fulfilled; waits go on
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self.install()
        return self

    def install(self) -> None:
        """Take the signals; again after ``ray.init``, which puts a handler of its own there."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                previous = signal.signal(number, self._on_signal)
                self._previous.setdefault(number, previous)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            _end_at_once(128 + number)
        self.requested = signal.Signals(number).name

    def check(self) -> None:
        """Raise :class:`StopRequested` when a signal came."""
        if self.requested is not None and not self.ending:
            raise StopRequested(self.requested)


def _end_at_once(code: int) -> None:
    """Take every process of this run along; nothing is saved."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(code)


class Waiter:
    """``ray.get`` for the driver.

    Args:
        stop: looked at while waiting, unless a wait must not be cut short.
        on_status: shown what the waited-for processes report, about twice a second.
    """

    def __init__(self, stop: StopSignals, on_status: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.stop = stop
        self.on_status = on_status

    def get(
        self,
        refs: Sequence[Any],
        what: str,
        deadline: float,
        *,
        actors: Mapping[str, Any] | None = None,
        interruptible: bool = True,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Results of ``refs`` in order.

        Args:
            what: names the wait, e.g. ``"rollout 3 to be generated"``.
            deadline: seconds from now.
            actors: name -> actor with a ``status()`` method; asked while waiting and for the report.
            meanwhile: called about four times a second; what it raises ends the wait.

        Raises:
            WaitExpired: with what each actor says it is doing.
            StopRequested: the user asked to stop and the wait is ``interruptible``.
            RayError: as soon as one of the refs failed, though others are still running.
        """
        import ray

        start = time.monotonic()
        status = _StatusPoll(actors or {})
        pending = list(refs)
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=0.25)
            ray.get(ready)  # a failure of one rank ends the wait for all
            if status.poll() and self.on_status:
                self.on_status(next(iter(status.latest.values())))
            if interruptible:
                self.stop.check()
            if pending and meanwhile is not None:
                meanwhile()
            waited = time.monotonic() - start
            if pending and waited > deadline:
                raise WaitExpired(
                    f"waited {waited:.0f} s (deadline {deadline:.0f} s, --phase-timeout) for {what}\n{status.report()}"
                )
        return list(ray.get(list(refs)))


class _StatusPoll:
    """Ask actors what they are doing without ever waiting for the answer."""

    def __init__(self, actors: Mapping[str, Any]) -> None:
        self.actors = actors
        self.latest: dict[str, dict[str, Any]] = {}
        self._asked: dict[str, Any] = {}

    def poll(self) -> bool:
        """Ask and collect; True when an answer came."""
        import ray

        news = False
        for name, actor in self.actors.items():
            ref = self._asked.get(name)
            if ref is None:
                self._asked[name] = actor.status.remote()
                continue
            done, _ = ray.wait([ref], timeout=0)
            if done:
                news = True
                del self._asked[name]
                try:
                    self.latest[name] = ray.get(done[0])
                except ray.exceptions.RayError as error:
                    self.latest[name] = {"phase": f"does not answer: {type(error).__name__}"}
        return news

    def report(self) -> str:
        lines = []
        for name in self.actors:
            said = self.latest.get(name)
            if not said:
                lines.append(f"  {name}: has not answered")
                continue
            age = time.time() - said.get("since", time.time())
            progress = f"{said.get('done', '')}/{said.get('total', '')}"
            lines.append(f"  {name}: {said.get('phase')} {progress} for {age:.0f} s")
        return "what the processes say:\n" + "\n".join(lines) if lines else ""
