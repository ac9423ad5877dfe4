"""Call a function of the user with a time limit, and report exceptions with their line and a
blocked event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from slime.config.hooks import NOT_AWAITED, call_problem, is_async

Hook = Callable[..., object]
"""A function or class of the user."""

_LOOK = 0.02  # seconds between two checks of the thread that runs the function
HOOK_THREAD = "hook"
# an event loop that is blocked for longer delays all other requests noticeably
STALL_SECONDS = 0.25


class Complaint(Exception):
    """A violation of a hook's contract. ``text`` describes it for the user; ``place`` is the file
    and line.
    """

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.place = place


@dataclass(frozen=True)
class Outcome:
    """The result of a call. ``stall`` is the longest time in seconds for which it blocked the event
    loop, and ``place`` the line where it did."""

    result: Any
    seconds: float
    stall: float = 0.0
    place: str = ""


def definition(fn: Hook) -> str:
    """Return the file and line where a function or class is defined, or an empty text."""
    try:
        return f"{short(inspect.getsourcefile(inspect.unwrap(fn)) or '?')}:{inspect.getsourcelines(fn)[1]}"
    except (TypeError, OSError):
        return ""


def wrong(fn: Hook, text: str) -> Complaint:
    """Create a complaint about a function as a whole, with the place of its definition."""
    return Complaint(text, definition(fn))


def short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def check_signature(fn: Hook, words: str, *args: object, **keywords: object) -> None:
    """Raise a :class:`Complaint` if ``fn(*args, **keywords)`` does not fit its signature.

    Args:
        words: The call as it is documented, for the message.
    """
    if not callable(fn):
        raise Complaint(f"it is a {type(fn).__name__}, not a function")
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some built-in functions have no signature
        return
    try:
        signature.bind(*args, **keywords)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise wrong(
            fn, f"slime calls it as {words}, but it is defined as {name}{signature}: {error}"
        ) from None


def check_call(name: str, fn: Hook) -> None:
    """Check the signature of a hook of :data:`slime.config.hooks.CALLS`, and that it is no async
    function.

    Args:
        name: The name of the hook's argument.
    """
    if problem := call_problem(name, fn):
        raise wrong(fn, problem)


def not_async(fn: Hook) -> None:
    """Refuse an async function for a hook that is called without await."""
    if is_async(fn):
        raise wrong(fn, NOT_AWAITED)


def check_picklable(sample: object) -> None:
    """Check that all attributes can be pickled: samples are saved in snapshots and sent between
    processes.
    """
    for name, entry in vars(sample).items():
        try:
            pickle.dumps(entry)
        except Exception as error:  # a user's object can raise anything when it is pickled
            raise Complaint(
                f"sample.{name} cannot be pickled ({type(error).__name__}: {error}): samples are "
                "saved and sent between processes, so store only plain data in them"
            ) from error


def guarded(fn: Hook, start: Callable[[], object], limit: float, loop: bool = False) -> Outcome:
    """Run ``start()``, which calls ``fn``, in a separate thread.

    Args:
        fn: The user's function. An exception is reported with the last line of its file in the
            traceback.
        start: Calls the function.
        limit: Deadline in seconds.
        loop: Whether to run it inside an event loop and await the result.

    Raises:
        Complaint: The call raised, or did not return within ``limit`` seconds.
    """
    file = _file(fn)
    watch = Watch(file)
    answer: dict[str, Any] = {}

    def work() -> None:
        try:
            answer["result"] = asyncio.run(watch.inside(start)) if loop else start()
        except BaseException as error:  # a user's function can also raise SystemExit
            answer["error"] = error

    # The thread cannot be ended from outside. If it does not return, the command reports that and
    # ends itself.
    thread = threading.Thread(target=work, name=HOOK_THREAD, daemon=True)
    begin = time.monotonic()
    thread.start()
    while thread.is_alive() and time.monotonic() - begin < limit:
        thread.join(_LOOK)
        watch.look()
    seconds = time.monotonic() - begin
    if thread.is_alive():
        where = _position(file)
        raise Complaint(f"it did not return within {limit:g} s", where or definition(fn))
    if "error" in answer:
        raise complaint_of(answer["error"], fn) from answer["error"]
    return Outcome(answer["result"], seconds, watch.longest, watch.place)


def complaint_of(error: BaseException, fn: Hook) -> Complaint:
    """Convert an exception to a complaint. If it was raised in the user's file, it gets the type
    and the line. The messages of slime's own ValueErrors and TypeErrors describe the problem
    already and are used alone."""
    if isinstance(error, Complaint):
        return error
    file = _file(fn)
    # A frame of the user's file says where; without one, the message of slime says what.
    theirs = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file
    ]
    if not theirs:
        ours = isinstance(error, ValueError | TypeError)
        return Complaint(
            str(error) if ours else f"it raised {type(error).__name__}: {error}", definition(fn)
        )
    place = f"{short(file)}:{theirs[-1].lineno} in {theirs[-1].name}"
    return Complaint(f"it raised {type(error).__name__}: {error}", place)


class Watch:
    """Measures how long a call blocks its event loop.

    A task in the loop updates a heartbeat, and another thread checks it. The loop counts as blocked
    if many checks in a row find the same heartbeat. A single late check is not enough: on a busy
    machine, both threads may have to wait.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.beat = 0.0
        self.longest = 0.0
        self.place = ""
        self._seen = 0.0
        self._looks = 0

    async def inside(self, start: Callable[[], object]) -> object:
        # The heartbeat shares the loop with the function, so that it stops when the function
        # blocks.
        beating = asyncio.ensure_future(self._beat())
        self.beat = time.monotonic()
        try:
            result = start()
            return await result if inspect.isawaitable(result) else result
        finally:
            beating.cancel()
            from slime.engines.http import close_session

            await close_session()  # the HTTP session belongs to this event loop, which ends now
            self.beat = 0.0

    async def _beat(self) -> None:
        while True:
            self.beat = time.monotonic()
            await asyncio.sleep(_LOOK)

    def look(self) -> None:
        self._looks = self._looks + 1 if self.beat and self.beat == self._seen else 0
        self._seen = self.beat
        stall = time.monotonic() - self._seen
        if self._looks * _LOOK >= STALL_SECONDS and stall > self.longest:
            self.longest = stall
            self.place = _position(self.file) or self.place


def _file(fn: Hook) -> str:
    for subject in (inspect.unwrap(fn), type(fn)):  # a callable object has the file of its class
        with suppress(TypeError):  # something built in
            return inspect.getsourcefile(subject) or ""
    return ""


def _position(file: str) -> str:
    """Return the innermost line of ``file`` in any thread. All threads are searched, because
    asyncio runs plain functions in threads of its own."""
    return next(
        (line for frame in sys._current_frames().values() if (line := _line(frame, file))), ""
    )


def _line(frame: FrameType | None, file: str) -> str:
    """Return the innermost line of ``file`` on a stack, or an empty text."""
    while frame is not None:
        if frame.f_code.co_filename == file:
            return f"{short(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
