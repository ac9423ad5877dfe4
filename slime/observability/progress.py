"""The current activity of this process, for the live line and for error messages after a timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TypedDict


class Progress(TypedDict, total=False):
    """The last report of a process about its activity; empty before the first report."""

    phase: str
    done: int
    total: int | None
    since: float
    """Wall time in seconds at which the phase began."""
    updated: float
    numbers: dict[str, float]


def is_progress(value: object) -> bool:
    """Whether a value that was read from a file has the types of a :class:`Progress`."""
    if not isinstance(value, Mapping):
        return False
    numbers = value.get("numbers", {})
    counts = [value[key] for key in ("done", "total", "since", "updated") if value.get(key) is not None]
    return (
        isinstance(value.get("phase", ""), str)
        and isinstance(numbers, Mapping)
        and all(isinstance(number, int | float) and abs(number) < 1e18 for number in (*counts, *numbers.values()))
    )


_lock = threading.Lock()
_latest = Progress()


def report(phase: str, done: int = 0, total: int | None = None, **numbers: float) -> None:
    """Report the current activity, such as ``report("generate", 12, 64, tokens=800)``. It is cheap enough to be called
    for every sample."""
    global _latest
    now = time.time()
    with _lock:
        goes_on = _latest.get("phase") == phase and done >= _latest["done"]  # a smaller count means a new start
        since = _latest["since"] if goes_on else now
        _latest = Progress(phase=phase, done=done, total=total, since=since, updated=now, numbers=numbers)


def latest() -> Progress:
    """Return a copy of the last report."""
    with _lock:
        return _latest.copy()
