"""What a process does now, how long its phases took, and what it leaves while somebody looks at it
with Python's debugger: nothing is printed, and no deadline passes.

The current activity is for the live line and for error messages after a timeout. Timers become the
metrics ``perf/<name>_time``.
"""

from __future__ import annotations

import contextlib
import os
import pdb
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NotRequired, TypedDict


class Progress(TypedDict, total=False):
    """The last report of a process about its activity; empty before the first report."""

    phase: str
    done: int
    total: int | None
    since: float
    """Wall time in seconds at which the phase began."""
    updated: float
    numbers: dict[str, float]
    warnings: list[str]
    """Those that nobody has taken yet."""


_lock = threading.Lock()
_latest = Progress()


def report(phase: str, done: int = 0, total: int | None = None, **numbers: float) -> None:
    """Report the current activity, such as ``report("generate", 12, 64, tokens=800)``. It is cheap
    enough to be called for every sample."""
    global _latest
    now = time.time()
    with _lock:
        # The beginning of a phase is kept as long as its count only grows, for rates.
        # a smaller count means a new start
        goes_on = _latest.get("phase") == phase and done >= _latest["done"]
        since = _latest["since"] if goes_on else now
        _latest = Progress(
            phase=phase, done=done, total=total, since=since, updated=now, numbers=numbers
        )


def latest() -> Progress:
    """Return a copy of the last report."""
    with _lock:
        return _latest.copy()


class Span(TypedDict):
    """A completed phase. ``start`` and ``end`` are wall times in seconds; without ``process``, it
    is the driver's.
    """

    name: str
    start: float
    end: float
    process: NotRequired[str]


class Timers:
    """Measures wall seconds by name. It is thread-safe. The times of a timer that runs several
    times are added up.

    >>> timers = Timers()
    >>> with timers("actor_train"):
    ...     pass
    >>> sorted(timers.pop())
    ['perf/actor_train_time']
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_pop: dict[str, float] = {}
        self._spans: list[Span] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the time of the block, also if it raises."""
        wall = time.time()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start, wall)

    def add(self, name: str, seconds: float, started: float | None = None) -> None:
        """Add seconds that were measured elsewhere.

        Args:
            started: Wall time of the start. Default: ``seconds`` before now.
        """
        begun = time.time() - seconds if started is None else started
        with self._lock:
            self._since_pop[name] = self._since_pop.get(name, 0.0) + seconds
            self._spans.append({"name": name, "start": begun, "end": begun + seconds})

    def pop(self) -> dict[str, float]:
        """Return ``{"perf/<name>_time": seconds}`` since the last call."""
        with self._lock:
            times = self._since_pop
            self._since_pop = {}
        return {f"perf/{name}_time": seconds for name, seconds in times.items()}

    def pop_spans(self) -> list[Span]:
        """Return the phases since the last call, for the trace file."""
        with self._lock:
            spans = self._spans
            self._spans = []
        return spans


class Debugger:
    """Knows whether a breakpoint of this process asks for commands, and for how long it has done
    so.

    Attributes:
        before: Called before a breakpoint takes the terminal.
    """

    def __init__(self) -> None:
        self.before: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._began: float | None = None
        self._seconds = 0.0

    def clock(self) -> float:
        """``time.monotonic()`` without the seconds at breakpoints, for deadlines."""
        began = self._began
        now = time.monotonic()
        return (now if began is None else began) - self._seconds

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """The time at a breakpoint. Another thread that reaches one waits for the end of this
        one.
        """
        with self._lock:
            self._began = time.monotonic()
            try:
                yield
            finally:
                self._seconds += time.monotonic() - self._began
                self._began = None

    @contextlib.contextmanager
    def breakpoints(self) -> Iterator[None]:
        """Let ``breakpoint()`` start a debugger that this object knows of, unless the user has
        chosen another.
        """
        before = sys.breakpointhook
        # Ray sets the variable in a process that it has been started in, and leaves it there for
        # all that follows.
        chosen = os.environ.get("PYTHONBREAKPOINT", "")
        if before is sys.__breakpointhook__ and (not chosen or chosen.startswith("ray.")):
            sys.breakpointhook = self._break
        try:
            yield
        finally:
            sys.breakpointhook = before

    def _break(self, *arguments: Any, **keywords: Any) -> None:
        for callback in self.before:
            callback()
        _Pdb(nosigint=True).set_trace(sys._getframe(1))


class _Pdb(pdb.Pdb):
    def interaction(self, *arguments: Any, **keywords: Any) -> None:
        with DEBUGGER.session():
            super().interaction(*arguments, **keywords)


DEBUGGER = Debugger()
