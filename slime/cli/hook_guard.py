"""Calling one user function under watch: time limit, exceptions with their line, and a blocked event loop."""

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
from dataclasses import dataclass
from types import FrameType
from typing import Any

Hook = Callable[..., object]
"""A function or a class of the user."""

_LOOK = 0.02  # seconds between looks at the thread that works
HOOK_THREAD = "hook"
STALL_SECONDS = 0.25  # an event loop that stands still for longer holds up every other request


class Complaint(Exception):
    """What breaks the contract, for the user; ``place`` is file and line."""

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.text, self.place = text, place


@dataclass(frozen=True)
class Outcome:
    """What a call gave. ``stall``: longest time in seconds for which it held the event loop, at ``place``."""

    result: Any
    seconds: float
    stall: float = 0.0
    place: str = ""


def definition(fn: Hook) -> str:
    """File and line where a function or class is defined."""
    try:
        return f"{short(inspect.getsourcefile(inspect.unwrap(fn)) or '?')}:{inspect.getsourcelines(fn)[1]}"
    except (TypeError, OSError):
        return ""


def wrong(fn: Hook, text: str) -> Complaint:
    """A complaint about a function as a whole."""
    return Complaint(text, definition(fn))


def short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def check_signature(fn: Hook, words: str, *args: object, **keywords: object) -> None:
    """Whether ``fn(*args, **keywords)`` is a possible call; ``words`` is the call as the documentation writes it."""
    try:
        signature = inspect.signature(fn)
    except ValueError:  # of some built-ins
        return
    try:
        signature.bind(*args, **keywords)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise wrong(fn, f"it is called as {words}, but is defined as {name}{signature}: {error}") from None


def not_async(fn: Hook) -> None:
    """For hooks that are called without await."""
    if inspect.iscoroutinefunction(fn):
        raise wrong(fn, "it is an async def, but this hook is called without await: make it a plain def")


def check_picklable(what: str, value: object) -> None:
    """Samples are saved with snapshots and sent between processes."""
    for name, entry in vars(value).items():
        try:
            pickle.dumps(entry)
        except Exception as error:  # whatever a user's object raises when it is pickled
            raise Complaint(
                f"{what}.{name} cannot be pickled ({type(error).__name__}: {error}): samples are saved and sent "
                "between processes, so keep only plain data on them"
            ) from error


def guarded(fn: Hook, start: Callable[[], object], limit: float, loop: bool = False) -> Outcome:
    """Run ``start()``, which calls ``fn``, on a thread of its own.

    Args:
        fn: the user's function; exceptions are placed at the last line of its file.
        loop: run inside an event loop and await the result.

    Raises:
        Complaint: it raised, or did not return within ``limit`` seconds.
    """
    file = _file(fn)
    watch = _Watch(file)
    answer: dict[str, Any] = {}

    def work() -> None:
        try:
            answer["result"] = asyncio.run(watch.inside(start)) if loop else start()
        except BaseException as error:  # SystemExit too: it is what the user's function did
            answer["error"] = error

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
    """An exception as a complaint: of the user's lines with its type, of ours as its words."""
    if isinstance(error, Complaint):
        return error
    file = _file(fn)
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not theirs:
        ours = isinstance(error, ValueError | TypeError)
        return Complaint(str(error) if ours else f"it raised {type(error).__name__}: {error}", definition(fn))
    place = f"{short(file)}:{theirs[-1].lineno} in {theirs[-1].name}"
    return Complaint(f"it raised {type(error).__name__}: {error}", place)


class _Watch:
    """How long the event loop of a call stands still.

    A stall counts when many looks in a row find the same beat. One look that comes late says nothing: on a busy machine
    the operating system keeps both threads waiting.
    """

    def __init__(self, file: str) -> None:
        self.file, self.beat, self.longest, self.place = file, 0.0, 0.0, ""
        self._seen, self._looks = 0.0, 0

    async def inside(self, start: Callable[[], object]) -> object:
        beating = asyncio.ensure_future(self._beat())
        self.beat = time.monotonic()
        try:
            result = start()
            return await result if inspect.isawaitable(result) else result
        finally:
            beating.cancel()
            from slime.engines.http import close_session

            await close_session()
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
    try:
        return inspect.getsourcefile(inspect.unwrap(fn)) or ""
    except TypeError:
        return inspect.getsourcefile(type(fn)) or ""


def _position(file: str) -> str:
    """The innermost line of ``file`` that any thread is in: plain functions run on a thread of asyncio's."""
    return next((line for frame in sys._current_frames().values() if (line := _line(frame, file))), "")


def _line(frame: FrameType | None, file: str) -> str:
    """The innermost line of ``file`` on a stack."""
    while frame is not None:
        if frame.f_code.co_filename == file:
            return f"{short(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
