"""The private Ray cluster of a run: who does not have the run's token is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from run_processes import command_line

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]
DRIVER = """
import os
from slime.cluster.actors import door
from slime.plugins.actors.ray_cluster import connect, disconnect

connect()
import ray

print(ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"], flush=True)


class Speaker:
    def says(self):
        return os.environ["WORDS"]


speaker = door().create(Speaker, environment={"WORDS": "of its own, 'quoted'"})
print(door().get([speaker.says.remote()], timeout=60)[0], flush=True)
input()
disconnect()
"""
STRANGER = (
    "import sys\nfrom ray._raylet import GcsClient\nGcsClient(address=sys.argv[1])\nprint('let in')"
)


def knock(address: str, home: Path, **more: str) -> str:
    """What a process with another home says that asks the cluster for its number."""
    clean = {name: words for name, words in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, address],
        env=clean | {"HOME": str(home)} | more,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.stdout + done.stderr


def test_only_the_token_of_the_run_opens_its_cluster(tmp_path: Path) -> None:
    """It has no process that only a larger cluster needs, and its actors have their
    environment.
    """
    old = tmp_path / ".ray" / "auth_token"  # Ray's own token of all clusters of a user
    old.parent.mkdir()
    old.write_text("b" * 64)
    clean = {name: words for name, words in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        env=clean | {"HOME": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        try:
            address, token = driver.stdout.readline().split()
            assert len(token) == 64 and token != "b" * 64
            assert driver.stdout.readline() == "of its own, 'quoted'\n"
            started = psutil.Process(driver.pid).children(recursive=True)
            words = " ".join(word for process in started for word in command_line(process)[:4])
            assert "gcs_server" in words and "raylet" in words
            for needless in ("monitor.py", "dashboard.py", "setup_worker.py"):
                assert needless not in words
            assert "let in" in knock(address, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
            for more in ({"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "disabled"}):
                said = knock(address, tmp_path, **more)
                assert "InvalidAuthToken" in said and "let in" not in said, said
        finally:
            driver.stdin.write("\n")
            driver.stdin.close()
