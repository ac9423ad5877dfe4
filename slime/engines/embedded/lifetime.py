"""A server process must not outlive the process that started it, however that one ends."""

from __future__ import annotations

import os
import threading
import time

POLL_SECONDS = 1.0


def die_with_parent(parent: int) -> None:
    """End this process, hard, once ``parent`` is no longer its parent (which is how a death shows, even by SIGKILL).

    Not PR_SET_PDEATHSIG: the kernel sends that when the *thread* that started the child ends.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
