"""Processes are waited for by what the kernel says of them."""

from __future__ import annotations

import subprocess
import sys

import psutil

from slime.engines.process import wait_gone

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_wait_gone_returns_those_that_live_on_and_not_the_ended_or_unreaped() -> None:
    children = [subprocess.Popen(SLEEP) for _ in range(3)]
    try:
        handles = [psutil.Process(child.pid) for child in children]
        children[0].kill()  # stays a zombie: nobody has asked for its exit code
        children[1].kill()
        children[1].wait()
        assert wait_gone(handles, 0.5) == [handles[2]]
        children[2].kill()
        assert wait_gone(handles, 10.0) == []
    finally:
        for child in children:
            child.kill()
            child.wait()
