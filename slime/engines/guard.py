"""``python -m slime.engines.guard --parent PID -- command …``: run a program that must not outlive
PID.

The guard is for programs that cannot watch their parent themselves, such as sglang-router, which
never releases Python's global interpreter lock. The guard terminates the program when process PID
is gone or when the guard receives SIGTERM, and exits when the program does. If the guard itself is
killed, the kernel kills the program. (Linux sends the parent-death signal when the thread that
started the child ends. The guard has only one thread, so that is when the guard ends.)

With ``--reap``, nothing that the program started outlives it, even in another session or process
group: the guard becomes the parent of orphaned descendants (Linux's child subreaper) and kills them
by their ids.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from slime.config.process import adopt_orphans, kill_with_parent

POLL_SECONDS = 0.5
GRACE_SECONDS = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--reap", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.reap:
        adopt_orphans()
    child = subprocess.Popen(command, preexec_fn=_die_with_guard, stdin=subprocess.DEVNULL)
    asked_to_stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, frame: asked_to_stop.append(got))
    while child.poll() is None:
        # A process whose parent has died gets another parent, so a changed parent id means that PID
        # is gone.
        if asked_to_stop or os.getppid() != options.parent:
            if options.reap:
                kill_descendants()
            return _end(child)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)
    if options.reap:
        kill_descendants()
    return int(child.returncode)


def _die_with_guard() -> None:
    kill_with_parent()
    # Ctrl-C also reaches the guard, which then terminates the program
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def kill_descendants() -> None:
    """Kill all descendants of this process, including those that start meanwhile, until none is
    alive.
    """
    # One pass is not enough: a descendant may start another process after the list was read and
    # before it is killed.
    deadline = time.monotonic() + GRACE_SECONDS
    while (living := _living(_descendants(os.getpid()))) and time.monotonic() < deadline:
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _descendants(pid: int) -> list[int]:
    descendants: list[int] = []
    open_pids = [pid]
    while open_pids:
        parent = open_pids.pop()
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                open_pids += (children := [int(word) for word in path.read_text().split()])
                descendants += children
    return descendants


def _living(pids: list[int]) -> list[int]:
    """Return the processes that still run, without zombies."""
    living = []
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            # The state follows the program's name, which stands in parentheses and may itself
            # contain parentheses.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                living.append(pid)
    return living


def _end(child: subprocess.Popen[bytes]) -> int:
    """Send SIGTERM, and SIGKILL after :data:`GRACE_SECONDS`."""
    child.terminate()
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
