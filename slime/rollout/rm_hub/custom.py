"""Users' reward functions: on a thread of their own, each bounded by ``--reward-timeout``.

They run on one event loop beside that of the rollout, so one that blocks (symbolic algebra inside an
``async def``, a request without a time limit) holds up other rewards at most, never the engines. A
loop that is stuck for longer than the limit is given up: the function that stands in it counts as
timed out, the other calls start again on a new loop. Objects that belong to an event loop (clients,
semaphores) must therefore be made inside the reward function, not taken from the generate function.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slime.rollout.hooks import is_async
from slime.rollout.verifier.pool import default_workers

logger = logging.getLogger(__name__)
_BEAT = 0.1  # seconds between looks at the open calls
_MOST_STARTS = 3


class RewardTimeout(TimeoutError):
    """A reward function used up its time; the message says where it stood."""


@dataclass(eq=False)
class _Call:
    start: Callable[[], Any]
    blocking: bool  # a plain function: runs in a thread
    limit: float
    used: float = 0.0  # seconds, in which the loop was free to run it
    running: bool = False
    expired: bool = field(default=False)


class _Host:
    """One event loop on a daemon thread, with a limit of plain functions that run at once."""

    def __init__(self, threads: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.open: dict[asyncio.Task[Any], _Call] = {}
        self.last_beat = time.monotonic()
        self.stuck = False
        self._slots = threads
        self._found: tuple[asyncio.Task[Any] | None, float] = (None, 0.0)  # the task that runs, since when
        self._thread = threading.Thread(target=self._serve, name="custom-rewards", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._threads = asyncio.Semaphore(self._slots)
        self.loop.run_forever()

    async def timed(self, call: _Call) -> Any:
        """Run one call; its time counts from here, or from when it got a thread."""
        task = asyncio.current_task()
        assert task is not None
        if not self.open:
            self.last_beat = time.monotonic()
            self._beat = self.loop.create_task(self._watch())
        self.open[task] = call
        try:
            if call.blocking:
                async with self._threads:
                    result = await self._in_thread(call)
            else:
                call.running = True
                result = call.start()
            return await result if inspect.isawaitable(result) else result
        finally:
            del self.open[task]
            if not self.open:
                self._beat.cancel()

    async def _in_thread(self, call: _Call) -> Any:
        """A daemon thread per call: one that hangs is left behind, and holds up neither others nor the exit."""
        future: asyncio.Future[Any] = self.loop.create_future()
        call.running = True

        def settle(result: object, error: BaseException | None) -> None:
            if not future.done():
                future.set_result(result) if error is None else future.set_exception(error)

        def work() -> None:
            try:
                answer: tuple[Any, BaseException | None] = (call.start(), None)
            except BaseException as error:  # it belongs to the caller, whatever it is
                answer = (None, error)
            self.loop.call_soon_threadsafe(settle, *answer)

        thread = threading.Thread(target=work, name="custom-reward", daemon=True)
        thread.start()
        try:
            return await future
        finally:
            if future.cancelled():  # nobody waits any more
                _left.append(thread)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_BEAT)
            now = time.monotonic()
            spent = min(now - self.last_beat, 2 * _BEAT)  # what another call blocked is not on these calls' account
            self.last_beat = now
            for task, call in list(self.open.items()):
                call.used += spent if call.running else 0.0
                if call.used > call.limit:
                    call.expired = True
                    task.cancel()

    def blocked_call(self, limit: float) -> _Call | None:
        """The call in which the loop was found at every look for ``limit`` seconds.

        That the loop is late does not suffice: many short calls that are ready together run in one turn of it.
        """
        task, now = asyncio.current_task(self.loop), time.monotonic()
        if task is not self._found[0]:
            self._found = (task, now)
        return self.open.get(task) if task is not None and now - self._found[1] > limit else None

    def position(self) -> str:
        """File and line in which the loop's thread stands."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


_left: list[threading.Thread] = []  # threads of plain functions that used up their time and did not end
_MOST_LEFT = 64
_lock = threading.Lock()
_host: _Host | None = None


def _current(threads: int) -> _Host:
    global _host
    with _lock:
        if _host is None or _host.stuck:
            _host = _Host(threads)
        return _host


async def call_bounded(
    limit: float, threads: int | None, fn: Callable[..., object], *args: object, **keywords: object
) -> Any:
    """Call a reward function, plain or async, from any event loop.

    Args:
        limit: seconds it may take. Functions with an attribute ``deadline(args) -> seconds`` have their own.
        threads: plain functions that run at once; default: half of the cores.

    Raises:
        RewardTimeout: it took longer, or blocked the loop of the rewards for longer.
    """
    count = threads or default_workers()
    _left[:] = [thread for thread in _left if thread.is_alive()]
    if not is_async(fn) and len(_left) >= _MOST_LEFT:
        raise RewardTimeout(
            f"{_MOST_LEFT} earlier calls of plain reward functions hang in threads that cannot be ended: no more are "
            "begun; give them limits of their own, or use slime.rollout.rm_hub.outcome.verify, which can be killed"
        )
    for _ in range(_MOST_STARTS):
        host = _current(count)
        call = _Call(functools.partial(fn, *args, **keywords), not is_async(fn), limit)
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(host.timed(call), host.loop))
        try:
            while not future.done() and not host.stuck and not call.expired:
                await asyncio.wait({future}, timeout=min(max(limit / 4, _BEAT), 2.0))
                _look_after(host, call)
        finally:
            future.cancel()
        if call.expired:
            raise RewardTimeout(f"no answer in {limit:g} s")
        if not host.stuck or (future.done() and not future.cancelled()):
            return _result(future)
    raise RewardTimeout(f"other reward functions blocked it {_MOST_STARTS} times for over {limit:g} s")


def _look_after(host: _Host, call: _Call) -> None:
    blocked = host.blocked_call(call.limit)
    if blocked is None:
        return
    with _lock:
        if host.stuck:
            return
        host.stuck = True
    blocked.expired = True
    logger.warning(
        "a reward function blocks its event loop for over %g s%s: it counts as timed out, its thread is left behind. "
        "Use asynchronous clients, or run such work with slime.rollout.rm_hub.outcome.verify, which can be killed.",
        blocked.limit,
        host.position(),
    )


def _result(future: asyncio.Future[object]) -> object:
    try:
        return future.result()
    except RuntimeError as error:
        if "event loop" in str(error):
            error.add_note("reward functions run on an event loop of their own: make clients and locks inside of them")
        raise
