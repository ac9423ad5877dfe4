"""``python -m slime.engines.guard --parent PID -- command …``: run a program that must not outlive PID.

For programs that cannot watch their parent themselves, such as sglang-router, which holds Python's lock all
its life. The guard ends the program when its own parent is gone, passes SIGTERM on, and ends with it; if the
guard itself is killed, the kernel kills the program (the guard has one thread only, so its parent-death
signal means what it says).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

POLL_SECONDS = 0.5
GRACE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    child = subprocess.Popen(command, preexec_fn=_die_with_guard, stdin=subprocess.DEVNULL)
    asked_to_stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, frame: asked_to_stop.append(got))
    while child.poll() is None:
        if asked_to_stop or os.getppid() != options.parent:
            return _end(child)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)
    return int(child.returncode)


def _die_with_guard() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the guard, which decides


def _end(child: subprocess.Popen[bytes]) -> int:
    """SIGTERM, then SIGKILL after a grace."""
    child.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if child.poll() is None:
        child.kill()
    child.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
