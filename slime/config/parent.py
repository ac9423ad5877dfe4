"""Processes that must not outlive the one that started them (Linux).

:mod:`slime.agent.sandbox_child` has its own copy of the first function, because it runs with nothing but Python.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

POLL_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def kill_with_parent() -> None:
    """Let the kernel kill this process when the *thread* that started it ends.

    It is for children of a thread that lives as long as its process. It holds from this call on: a parent that ended
    before is not noticed. Other children use :func:`end_with_parent`.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end, so that they can be found and waited for."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """End this process, without clean-up, once ``parent`` is no longer its parent, which is how a death shows even
    after SIGKILL. A thread asks each second; whichever thread of the parent started this process does not matter."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
