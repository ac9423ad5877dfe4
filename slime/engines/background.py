"""One event loop on a thread of its own, for the asynchronous parts of a synchronous program."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner = 0  # pid: a forked child has the loop object but not its thread


def background_loop() -> asyncio.AbstractEventLoop:
    """The loop; its daemon thread is started on first use."""
    global _loop, _owner
    with _lock:
        if _loop is None or _owner != os.getpid():
            _loop, _owner = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="slime-loop", daemon=True).start()
        return _loop


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop and return its result; an exception propagates.

    When the waiting thread is interrupted (Ctrl-C), the coroutine is cancelled.

    Raises:
        RuntimeError: called from the background loop itself, where it would wait for itself.
    """
    loop = background_loop()
    if _running_loop() is loop:
        coroutine.close()
        raise RuntimeError("async_utils.run() was called from a coroutine on the same loop: use 'await' there")
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
