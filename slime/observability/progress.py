"""What this process is doing right now, for the live line and for the report of a wait that expired."""

from __future__ import annotations

import threading
import time
from typing import Any

_lock = threading.Lock()
_latest: dict[str, Any] = {}


def report(phase: str, done: int = 0, total: int | None = None, **numbers: float) -> None:
    """Say what is under way: ``report("generate", 12, 64, tokens=800)``. Cheap enough for every sample."""
    now = time.time()
    with _lock:
        goes_on = _latest.get("phase") == phase and done >= _latest["done"]  # fewer done: it began again
        since = _latest["since"] if goes_on else now
        _latest.clear()
        _latest.update(phase=phase, done=done, total=total, since=since, updated=now, numbers=numbers)


def latest() -> dict[str, Any]:
    """The last report: ``phase, done, total, since, updated, numbers``; empty before the first."""
    with _lock:
        return dict(_latest)
