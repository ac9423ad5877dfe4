"""What a run does while somebody looks at it with Python's debugger: nothing is printed, and no
deadline passes.
"""

from __future__ import annotations

import contextlib
import os
import pdb
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class Debugger:
    """Knows whether a breakpoint of this process asks for commands, and for how long it has done
    so.

    Attributes:
        before: Called before a breakpoint takes the terminal.
    """

    def __init__(self) -> None:
        self.before: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._began: float | None = None
        self._seconds = 0.0

    def clock(self) -> float:
        """``time.monotonic()`` without the seconds at breakpoints, for deadlines."""
        began = self._began
        now = time.monotonic()
        return (now if began is None else began) - self._seconds

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """The time at a breakpoint. Another thread that reaches one waits for the end of this
        one.
        """
        with self._lock:
            self._began = time.monotonic()
            try:
                yield
            finally:
                self._seconds += time.monotonic() - self._began
                self._began = None

    @contextlib.contextmanager
    def breakpoints(self) -> Iterator[None]:
        """Let ``breakpoint()`` start a debugger that this object knows of, unless the user has
        chosen another.
        """
        before = sys.breakpointhook
        # Ray sets the variable in a process that it has been started in, and leaves it there for
        # all that follows.
        chosen = os.environ.get("PYTHONBREAKPOINT", "")
        if before is sys.__breakpointhook__ and (not chosen or chosen.startswith("ray.")):
            sys.breakpointhook = self._break
        try:
            yield
        finally:
            sys.breakpointhook = before

    def _break(self, *arguments: Any, **keywords: Any) -> None:
        for callback in self.before:
            callback()
        _Pdb(nosigint=True).set_trace(sys._getframe(1))


class _Pdb(pdb.Pdb):
    def interaction(self, *arguments: Any, **keywords: Any) -> None:
        with DEBUGGER.session():
            super().interaction(*arguments, **keywords)


DEBUGGER = Debugger()
