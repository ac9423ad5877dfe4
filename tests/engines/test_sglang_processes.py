"""Real SGLang's processes: a server that cannot start says why, and none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from engine_parts import engine_settings

from slime.engines.launch import EngineSpec, start_engine
from slime.engines.process import ServerFailed

pytestmark = [pytest.mark.sglang, pytest.mark.real, pytest.mark.long, pytest.mark.timeout(600)]
FLAGS = {"rollout_backend": "sglang", "sglang": {"device": "cpu", "max_total_tokens": 4096}}

PARENT = """
import sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from engine_parts import engine_settings
from slime.engines.launch import start_engine
from slime.engines.launch import EngineSpec
from slime.plugins.sglang.launch import warm_up
model = Path({model!r})
engine = start_engine(engine_settings(model, **{flags!r}), EngineSpec(0, str(model)), log_path={log!r})
engine.wait_ready(500)
warm_up(engine.url, 60.0)
print(engine.pid, flush=True)
time.sleep(300)
"""


def alive(processes: list[psutil.Process]) -> list[str]:
    """Names of those that run; an entry that nobody reaps in a container does not count."""
    found = []
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
        except psutil.NoSuchProcess:
            continue
    return found


def test_all_processes_of_a_server_die_with_a_killed_parent(
    tiny_llama: Path, tmp_path: Path
) -> None:
    script = PARENT.format(
        path=[str(folder) for folder in Path(__file__).parents[:2]],
        model=str(tiny_llama),
        flags=FLAGS,
        log=str(tmp_path / "log"),
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    processes: list[psutil.Process] = []
    try:
        assert parent.stdout is not None
        guard = psutil.Process(int(parent.stdout.readline()))
        processes = [guard, *guard.children(recursive=True)]
        assert len(processes) >= 4, "guard, server, scheduler, detokenizer"
        os.kill(parent.pid, signal.SIGKILL)
        until = time.monotonic() + 30
        while alive(processes) and time.monotonic() < until:
            time.sleep(0.1)
        assert alive(processes) == []
    finally:
        parent.kill()
        parent.wait(10)
        for process in processes:
            if process.is_running():
                process.kill()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    engine = start_engine(
        engine_settings(missing, **FLAGS), EngineSpec(3, str(missing)), log_path=tmp_path / "log"
    )
    try:
        with pytest.raises(
            ServerFailed, match=r"(?s)SGLang engine 3 \(pid \d+\) ended with .*nothing"
        ):
            engine.wait_ready(240)
    finally:
        engine.stop()
