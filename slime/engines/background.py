"""Event loops that run on background threads, for the asynchronous parts of a synchronous program."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loops: dict[tuple[str, int], asyncio.AbstractEventLoop] = {}


def background_loop(name: str = "slime-loop") -> asyncio.AbstractEventLoop:
    """Return the event loop with this name, and start its daemon thread at the first call.

    :func:`run` uses the loop with the default name.
    """
    key = name, os.getpid()  # a forked child inherits the loop object but not its thread, so it needs its own loop
    with _lock:
        if key not in _loops:
            _loops[key] = asyncio.new_event_loop()
            threading.Thread(target=_loops[key].run_forever, name=name, daemon=True).start()
        return _loops[key]


def run(coroutine: Coroutine[object, None, T]) -> T:
    """Run a coroutine on the background loop and return its result. An exception of the coroutine propagates.

    If the waiting thread is interrupted (Ctrl-C), the coroutine is cancelled.

    Raises:
        RuntimeError: It was called on the background loop itself, where it would wait for itself forever.
    """
    loop = background_loop()
    if _running_loop() is loop:
        coroutine.close()
        raise RuntimeError("async_utils.run() was called from a coroutine of the same event loop: use await instead")
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
