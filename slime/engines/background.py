"""Event loops that run on background threads, for the asynchronous parts of a synchronous
program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Collection, Coroutine
from typing import TypeVar

T = TypeVar("T")

ENDS_A_LOOP = (SystemExit, KeyboardInterrupt)
"""What asyncio lets out of a task and out of its loop. In a thread only a function raises these."""

_lock = threading.Lock()
_loops: dict[tuple[str, int], asyncio.AbstractEventLoop] = {}
_waited_for: dict[int, asyncio.Task[object]] = {}
"""By thread: the task for whose result it waits in :func:`run`."""


def background_loop(name: str = "slime-loop") -> asyncio.AbstractEventLoop:
    """Return the event loop with this name, and start its daemon thread at the first call.

    :func:`run` uses the loop with the default name.
    """
    # a forked child inherits the loop object but not its thread, so it needs its own loop
    key = name, os.getpid()
    with _lock:
        if key not in _loops:
            _loops[key] = asyncio.new_event_loop()
            threading.Thread(
                target=serve_forever, args=(_loops[key],), name=name, daemon=True
            ).start()
        return _loops[key]


def serve_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop also after a user's function in it has called ``sys.exit`` or raised
    ``KeyboardInterrupt``: asyncio leaves the loop then, and whoever waits for one of its tasks
    would wait forever.
    """
    while True:
        with contextlib.suppress(*ENDS_A_LOOP):
            loop.run_forever()
            return


def run(coroutine: Coroutine[object, None, T]) -> T:
    """Run a coroutine on the background loop and return its result. An exception of the coroutine
    propagates.

    If the waiting thread is interrupted (Ctrl-C), the coroutine is cancelled.

    Raises:
        RuntimeError: It was called on the background loop itself, where it would wait for itself
            forever.
    """
    loop = background_loop()
    if asyncio._get_running_loop() is loop:
        coroutine.close()
        raise RuntimeError(
            "async_utils.run() was called from a coroutine of the same event loop: use await "
            "instead"
        )
    thread = threading.get_ident()

    async def known() -> T:
        task = asyncio.current_task()
        assert task is not None
        _waited_for[thread] = task
        try:
            return await coroutine
        except ENDS_A_LOOP as error:  # of a user's function
            raise RuntimeError(f"a function raised {error!r}, which ends no run") from error
        finally:
            del _waited_for[thread]

    future = asyncio.run_coroutine_threadsafe(known(), loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def cancel_waits(threads: Collection[int]) -> None:
    """Cancel what these threads wait for in :func:`run`, which then raises ``CancelledError``
    there.

    It raises when the coroutine has ended, with all that it does in its ``finally`` blocks.
    """

    def cancel() -> None:
        for thread in _waited_for.keys() & threads:
            _waited_for[thread].cancel()

    background_loop().call_soon_threadsafe(cancel)
