"""Processes are waited for by what the kernel says of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from slime.engines import process
from slime.engines.process import ServerFailed, ServerProcess, free_port, wait_gone

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
        assert wait_gone(handles, 60.0) == []
    finally:
        for child in children:
            child.kill()
            child.wait()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_the_mark_of_a_port_ends_with_its_server(end: str) -> None:
    port, kept = free_port(), free_port()
    server = ServerProcess("sleeper", SLEEP, "http://127.0.0.1:1", None, {}, [("127.0.0.1", port)])
    assert {("127.0.0.1", port), ("127.0.0.1", kept)} <= set(process._marks)
    getattr(server, end)()
    assert ("127.0.0.1", port) not in process._marks and ("127.0.0.1", kept) in process._marks


def suspend(server: ServerProcess) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    until = time.monotonic() + 60
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
            # as if a driver held it in the kernel
            patch.setattr(server.child, "kill", lambda: None)
            server.stop()
            assert server.alive()
        server.stop()
        assert server.child.returncode == -signal.SIGKILL
    finally:
        server.kill()


@pytest.mark.parametrize("who", ["server", "child"])
def test_a_server_that_is_frozen_is_killed_also_while_it_starts(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.engines.process.FROZEN_SECONDS", 0.3)
    monkeypatch.setattr("slime.engines.process.LOOK_SECONDS", 0.05)
    slow = ServerProcess("sleeper", SLEEP, "http://127.0.0.1:1", None, {})
    parent = [sys.executable, "-c", f"import subprocess; subprocess.run({SLEEP})"]
    server = ServerProcess(
        "sleeper", SLEEP if who == "server" else parent, "http://127.0.0.1:1", None, {}
    )
    try:
        if who == "server":
            suspend(server)
        else:
            until = time.monotonic() + 60
            while not (children := psutil.Process(server.pid).children()):
                assert time.monotonic() < until
                time.sleep(0.01)
            children[0].suspend()
        with pytest.raises(ServerFailed, match=r"status -9.*SIGSTOP.*0 s"):
            server.wait_ready(60.0)
        assert not server.alive() and slow.alive()
        # one that only takes its time has its whole deadline
        with pytest.raises(ServerFailed, match="healthy"):
            slow.wait_ready(1.0)
    finally:
        server.kill()
        slow.kill()


def test_a_port_is_given_once_while_its_asker_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    ask = (
        f"import slime.engines.process as p; p._PORTS = range({first - 1}, {first + 2}); "
        "print(p.free_port())"
    )
    other = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert int(other.stdout) in {first - 1, first + 1}  # nobody listens on the first yet
    monkeypatch.setattr("slime.engines.process._PORTS", range(first, first + 1))
    with pytest.raises(RuntimeError, match=f"{first}.*{first}.*on 127.0.0.1"):
        free_port()


def test_a_port_is_free_of_listeners_and_of_the_kernels_own_choices() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) < 32_768
    # the UDP mark is not in a server's way
    with socket.create_server(("127.0.0.1", ports[0])) as listener:
        assert listener.getsockname()[1] == ports[0]
