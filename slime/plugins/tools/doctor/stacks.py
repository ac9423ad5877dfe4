"""What the Python processes of a run do at the moment, by py-spy where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SECONDS = 10.0
_FRAMES = 4
_FRAME = re.compile(r"^ {4}(\S.*) \(([^()]+)\)$", re.MULTILINE)
_OF_RAY = ("raylet", "gcs_server", "/ray/dashboard/", "/ray/_private/", "runtime_env/agent")
"""Words in the command lines of Ray's own servers, which say nothing about the run."""


def find_py_spy() -> str | None:
    """Return the path of py-spy; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if beside.is_file() else None)


def stacks(processes: Sequence[tuple[int, str]]) -> list[str]:
    """Return a line for each Python process that can be looked into: its innermost frames, the innermost first.

    The processes are not paused for it.

    Args:
        processes: Process ids and names.
    """
    program = find_py_spy()
    if program is None:
        return ["py-spy is not installed (pip install py-spy): the stacks of the processes are not shown"]
    lines = []
    for pid, name in processes:
        if any(word in name for word in _OF_RAY):
            continue
        frames = _main_thread(_dump(program, pid), pid)
        if frames:
            lines.append(f"pid {pid} ({name[:40]}): {' < '.join(frames)}")
    return lines or ["py-spy can read no process of the run: it needs the same user, and CAP_SYS_PTRACE in a container"]


def _dump(program: str, pid: int) -> str:
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _main_thread(dump: str, pid: int) -> list[str]:
    """Return the frames of the main thread, and the innermost one of slime if it lies deeper in the stack."""
    threads = re.split(r"^(?=Thread )", dump, flags=re.MULTILINE)
    # Its thread id is that of the process; its name is known only where threading was imported.
    main = next((one for one in threads if one.startswith(f"Thread {pid} ")), "")
    frames = [f"{function} ({where})" for function, where in _FRAME.findall(main)]
    shown = frames[:_FRAMES]
    own = next((frame for frame in frames[_FRAMES:] if "slime/" in frame), None)
    return [*shown, "...", own] if own is not None else shown
