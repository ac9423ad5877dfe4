"""What an actor prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
