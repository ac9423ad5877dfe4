"""What killed servers leave behind is removed; what is in use, young or somebody else's is not."""

from __future__ import annotations

import mmap
import os
import socket
import time
from pathlib import Path

import pytest

from slime.cluster import leftovers


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(leftovers, "LEAST_AGE_SECONDS", -1.0)
    monkeypatch.setattr(leftovers, "MANAGER_AGE_SECONDS", -1.0)
    return tmp_path


def test_load_counters_of_dead_servers_are_removed(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, mapped, opened, other = (folders / f"sglang_loads_{name}_0f.shm" for name in ("left", "map", "open", "link"))
    for file in (left, mapped, opened, folders / "precious"):
        file.write_bytes(b"0" * 64)
    other.symlink_to(folders / "precious")
    (folders / "sglang_loads_.shm.bak").touch()
    descriptor = os.open(mapped, os.O_RDWR)
    view = mmap.mmap(descriptor, 64)
    os.close(descriptor)
    with opened.open():
        assert leftovers.sweep_leftovers() == [str(left)]
    view.close()
    assert other.is_symlink() and (folders / "precious").exists() and (folders / "sglang_loads_.shm.bak").exists()
    monkeypatch.setattr(leftovers, "LEAST_AGE_SECONDS", 3600.0)
    assert leftovers.sweep_leftovers() == [] and mapped.exists()
    monkeypatch.setattr(leftovers, "LEAST_AGE_SECONDS", -1.0)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert leftovers.sweep_leftovers() == []


def test_folders_of_dead_shared_memory_managers_are_removed(folders: Path) -> None:
    names = ("torch-shm-dir-dead00", "torch-shm-dir-live00", "torch-shm-dir-full00", "torch-shm-dir-empty0")
    dead, live, full, empty = (folders / name for name in names)
    for folder in (dead, live, full, empty):
        folder.mkdir()
    (full / "data").touch()
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for folder, listener in zip((dead, live), sockets, strict=True):
        listener.bind(str(folder / "manager.sock"))
        listener.listen()
    sockets[0].close()
    assert sorted(leftovers.sweep_leftovers()) == sorted([str(dead), str(empty)])
    assert live.exists() and full.exists()
    sockets[1].close()


def test_a_short_run_sweeps_its_own_manager(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that was started half a minute ago and is dead now; one that starts at this moment is left alone."""
    monkeypatch.undo()
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(folders))
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", folders)
    dead, starts = folders / "torch-shm-dir-dead00", folders / "torch-shm-dir-new000"
    for folder, age in ((dead, 30.0), (starts, 0.0)):
        folder.mkdir()
        os.utime(folder, (time.time() - age,) * 2)
    assert leftovers.sweep_leftovers() == [str(dead)] and starts.exists()


def test_a_folder_that_vanishes_meanwhile_is_no_error(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run on this machine sweeps at the same time."""
    gone = folders / "torch-shm-dir-gone00"
    monkeypatch.setattr(leftovers, "own_entries", lambda folder, name, *_: [gone] if name is leftovers.MANAGERS else [])
    assert leftovers.sweep_leftovers() == []


def test_a_manager_that_does_not_accept_is_not_waited_for(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, and others wait to be accepted already."""
    monkeypatch.setattr(leftovers, "CONNECT_SECONDS", 0.05)
    folder = folders / "torch-shm-dir-stop00"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as other:
        listener.bind(str(folder / "manager.sock"))
        listener.listen(0)
        other.connect(str(folder / "manager.sock"))
        assert leftovers.sweep_leftovers() == [] and folder.exists()
