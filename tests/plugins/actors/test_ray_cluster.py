"""The private cluster of a run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from slime.cluster.actors import ClusterError
from slime.plugins.actors import ray_cluster
from slime.plugins.actors.ray_cluster import connect, disconnect, object_store_bytes
from slime.plugins.actors.worker_start import command

GIB = 2**30


@pytest.mark.parametrize(
    ("memory", "shared", "expected"),
    [(20, 20, 2), (2000, 1000, 200), (2000, 16, 12.8), (1, 1, 0.25), (2000, 0.06, 0.25)],
)
def test_the_object_store_grows_with_the_machine(
    monkeypatch: pytest.MonkeyPatch, memory: float, shared: float, expected: float
) -> None:
    """A rollout of 100,000 samples of 32k tokens takes 30 GB there; it must fit into shared memory,
    whatever Docker gives of that."""
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=int(memory * GIB))
    )
    monkeypatch.setattr(psutil, "disk_usage", lambda path: SimpleNamespace(free=int(shared * GIB)))
    assert object_store_bytes() == pytest.approx(expected * GIB, abs=10)


def test_a_connection_of_the_programs_own_is_used_and_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("the program's own connection")

    # whatever other tests in this process have left
    monkeypatch.setattr(ray_cluster, "connected", False)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "init", refused)
    monkeypatch.setattr(ray, "shutdown", refused)
    connect()
    disconnect()


def test_why_ray_did_not_start_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Messages of a run that was started with at most 40 open files."""
    session_folder = tmp_path / "session_2026-11-25_10-15-09_848897_18513"
    waited = (
        "Timed out waiting for file "
        f"{session_folder}/gcs_server_port_1ae9b354192b4ba6c017cb33ab1e23683df98dcb"
    )

    def init(**_: object) -> None:
        raise RuntimeError(waited)

    monkeypatch.setattr(ray_cluster, "connected", False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(RuntimeError, match=r"^Timed out waiting"):  # its server has left no log
        connect()
    (session_folder / "logs").mkdir(parents=True)
    (session_folder / "logs" / "gcs_server.out").write_text(
        "[2026-11-25 10:15:09,899 I 18578 18578] (gcs_server) gcs_server.cc:196: GCS node ID "
        "initialized from config\n"
        "[2026-11-25 10:15:09,900 E 18578 18578] (gcs_server) logging.cc:118: Unhandled "
        "exception: N5boost10wrapexceptINS_6system12system_errorEEE. what(): signal_set_service "
        "pipe: Too many open files [system:24] /opt/ray/gcs_server(+0x14c3daa) [0x5596eec14daa]\n"
    )
    with pytest.raises(ClusterError, match=r"gcs_server\.out") as raised:
        connect()
    assert str(raised.value.__cause__) == waited


@pytest.mark.parametrize(("failures", "starts"), [(2, True), (3, False)])
def test_a_cluster_that_starts_too_slowly_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failures: int, starts: bool
) -> None:
    """What is left of the attempt before is killed first."""
    left: list[subprocess.Popen[bytes]] = []

    def init(**_: object) -> None:
        assert all(child.poll() is not None for child in left)
        if len(left) < failures:
            left.append(subprocess.Popen(["sleep", "600"]))
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"})
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_cluster, "connected", False)
    try:
        if starts:
            connect()
        else:
            with pytest.raises(Exception, match="during startup"):
                connect()
        assert capsys.readouterr().err.count("trying again") == 2
    finally:
        for child in left:
            child.kill()
            child.wait()


def test_the_address_of_a_cluster_that_has_ended_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray itself would wait for a quarter of an hour."""
    asked = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **given: asked.append(given["address"]))
    monkeypatch.setattr(ray_cluster, "connected", False)
    with socket.create_server(("", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        connect()
    with pytest.raises(ClusterError, match=f"RAY_ADDRESS={address}: no Ray cluster"):
        connect()
    monkeypatch.setenv("RAY_ADDRESS", "ray://nowhere:10001")  # another form is Ray's affair
    connect()
    assert asked == [address, "ray://nowhere:10001"]


def test_other_errors_of_ray_are_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def init(**_: object) -> None:
        asked.append(1)
        raise RuntimeError("no port")

    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"})
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_cluster, "connected", False)
    with pytest.raises(RuntimeError, match="no port"):
        connect()
    assert asked == [1]


def test_a_folder_that_hides_this_package_is_named_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClusterError, match=f"{tmp_path}/slime"):
        connect()


def test_a_worker_gets_the_command_of_ray_and_the_environment_of_its_actor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's own program does the same, and imports Ray for it."""
    monkeypatch.setenv("OUTER", "x")
    context = '{"env_vars": {"INNER": "${OUTER}:y"}, "py_executable": "/bin/python"}'
    given = ["worker.py", "--node-id=1", "--language=PYTHON"]
    words, variables = command([*given, f"--serialized-runtime-env-context={context}"])
    assert words == ["/bin/python", "worker.py", "--node-id=1"]
    assert variables == {"INNER": "x:y"}
    assert command(given) == ([sys.executable, "worker.py", "--node-id=1"], {})
