"""Recognize a full disk, and wait until there is room again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

MIB = 2**20
LEAST_SECONDS, MOST_SECONDS, POLL_SECONDS = 1.0, 60.0, 0.5
_TEXTS = ("No space left on device", "Disk quota exceeded")


def is_full(error: BaseException) -> bool:
    """Whether a write failed because the disk or a quota is full.

    Errors of other processes, of torch and of safetensors arrive as text, so the text decides.
    """
    return any(text in str(error) for text in _TEXTS)


def wait_for_room(
    folder: Path,
    check: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when ``folder`` has more free space than now, or after a minute: free space does not show a quota.

    Args:
        check: Called about twice a second. An exception that it raises ends the wait.
    """
    start, before = clock(), shutil.disk_usage(folder).free
    while (waited := clock() - start) < MOST_SECONDS:
        if waited >= LEAST_SECONDS and shutil.disk_usage(folder).free > before + MIB:
            return
        check()
        sleep(POLL_SECONDS)
