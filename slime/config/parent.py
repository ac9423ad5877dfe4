"""Processes that must not outlive the process that started them (on Linux).

:mod:`slime.plugins.agents.sandbox_child` has its own copy of the first function, because it runs with the standard
library only.
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

    Use it only for children of a thread that lives as long as its process; other children use
    :func:`end_with_parent`. A parent that ended before this call is not noticed.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the new parent of descendants whose own parent ends, so that it can find and wait for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """End this process without clean-up once ``parent`` is no longer its parent.

    The parent process id changes when the parent dies for any reason, even by SIGKILL. A thread polls it each second,
    so unlike in :func:`kill_with_parent` it does not matter which thread of the parent started this process.

    Args:
        parent: The process id of the parent at the start of this process.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
