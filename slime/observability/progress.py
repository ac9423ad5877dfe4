"""What this process is doing right now, for the live line and for the report of a wait that expired."""

from __future__ import annotations

import threading
import time
from typing import TypedDict


class Progress(TypedDict, total=False):
    """What a process says that it is doing; empty before its first report."""

    phase: str
    done: int
    total: int | None
    since: float
    """When the phase began, in wall seconds."""
    updated: float
    numbers: dict[str, float]


_lock = threading.Lock()
_latest = Progress()


def report(phase: str, done: int = 0, total: int | None = None, **numbers: float) -> None:
    """Say what is under way: ``report("generate", 12, 64, tokens=800)``. Cheap enough for every sample."""
    global _latest
    now = time.time()
    with _lock:
        goes_on = _latest.get("phase") == phase and done >= _latest["done"]  # fewer done: it began again
        since = _latest["since"] if goes_on else now
        _latest = Progress(phase=phase, done=done, total=total, since=since, updated=now, numbers=numbers)


def latest() -> Progress:
    """The last report; empty before the first."""
    with _lock:
        return _latest.copy()
