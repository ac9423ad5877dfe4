"""What an actor prints, and how it is ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from slime.cluster.actors import ActorProcess
from slime.engines import process as processes
from slime.plugins.actors.ray_actors import _end_here

PRINTS = """
import ctypes, logging, os, resource, signal, sys
from pathlib import Path
from slime.plugins.actors.ray_actors import redirect_output

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
redirect_output(Path(sys.argv[1]), "actor")
print("first", "\\ud83d")
os.write(1, b"of a C library\\n")
room = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (Path(sys.argv[1], "actor.log").stat().st_size + 5, room[1]))
for number in range(1000):
    print("a line that does not fit", number, flush=True)
    logging.getLogger("x").warning("nor does this")
    sys.stderr.write("nor this\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, room)
print("last")
"""


def test_printing_does_not_fail_on_a_full_disk(tmp_path: Path) -> None:
    """A print in a user's reward function ended the run."""
    ended = subprocess.run(
        [sys.executable, "-c", PRINTS, str(tmp_path)], capture_output=True, text=True, check=False
    )
    lines = (tmp_path / "actor.log").read_text().splitlines()
    assert ended.returncode == 0, lines[-5:]
    assert (
        lines[0] == "first \\ud83d" and lines[1] == "of a C library" and lines[-1].endswith("last")
    )
    assert not any("Traceback" in line for line in lines)


def test_who_ends_when_ray_ends_it_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray tells of a process that somebody else has killed as of a crash, after a run in order."""
    waits: list[float] = []

    def none_left(asked: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
        waits.append(seconds)
        return []

    monkeypatch.setattr(processes, "wait_gone", none_left)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = psutil.Process(worker.pid).create_time()
        assert _end_here([ActorProcess("here", worker.pid, started)], 5.0) == []
        assert worker.poll() is None and len(waits) == 2
    finally:
        worker.kill()
        worker.wait()
