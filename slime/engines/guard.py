"""``python -m slime.engines.guard --parent PID -- command …``: run a program that must not outlive PID.

For programs that cannot watch their parent themselves, such as sglang-router, which holds Python's lock all
its life. The guard ends the program when its own parent is gone, passes SIGTERM on, and ends with it; if the
guard itself is killed, the kernel kills the program (the guard has one thread only, so its parent-death
signal means what it says).

With ``--reap`` nothing that the program started outlives it, in whatever session or process group it put itself: the
guard is the parent of its orphans (Linux's child subreaper) and kills them by their ids.
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

from slime.config.parent import adopt_orphans, kill_with_parent

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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the guard, which decides


def kill_descendants() -> None:
    """Kill the children of this process, theirs, and those that are born meanwhile, until none lives."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (living := _living(_descendants(os.getpid()))) and time.monotonic() < deadline:
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    open_pids = [pid]
    while open_pids:
        parent = open_pids.pop()
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                open_pids += (children := [int(word) for word in path.read_text().split()])
                found += children
    return found


def _living(pids: list[int]) -> list[int]:
    """Those that are no zombies."""
    living = []
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                living.append(pid)
    return living


def _end(child: subprocess.Popen[bytes]) -> int:
    """SIGTERM, then SIGKILL after a grace."""
    child.terminate()
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
