"""Processes are waited for by what the kernel says of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from slime.engines.process import ServerProcess, wait_gone

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


def suspend(server: ServerProcess) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    until = time.monotonic() + 10
    while psutil.Process(server.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_server_that_does_not_end_when_asked_is_killed_and_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slime.engines.process.STOP_SECONDS", 0.3)
    server = ServerProcess("sleeper", SLEEP, "http://127.0.0.1:1", None, {})
    try:
        suspend(server)  # SIGTERM alone does not end it
        with monkeypatch.context() as patch:
            patch.setattr(server.child, "kill", lambda: None)  # as if a driver held it in the kernel
            server.stop()
            assert server.alive()
        server.stop()
        assert server.child.returncode == -signal.SIGKILL
    finally:
        server.kill()
