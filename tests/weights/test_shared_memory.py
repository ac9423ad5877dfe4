"""Sweeping shared memory: files of dead processes of this user go, and nothing else that anybody
names there.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.weights.transports import shared_memory
from slime.weights.transports.shared_memory import FileList, sweep_shared_memory

OTHER_USER, VICTIM = 23456, 12345
LIST = "slime-weights-4711-0123abcd"
BUFFER = "torch_4711_1_0"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder like /dev/shm, which every user may write to."""
    made = Path(tempfile.mkdtemp(prefix="slime-shm-", dir="/tmp"))
    made.chmod(0o1777)
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", str(made))
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: str(made))
    yield made
    shutil.rmtree(made)


def write_list(folder: Path, *entries: str, name: str = LIST) -> Path:
    path = folder / name
    path.write_text("".join(f"{entry}\n" for entry in entries))
    path.chmod(0o666)
    return path


def buffer(folder: Path, name: str = BUFFER) -> Path:
    path = folder / name
    path.write_bytes(b"weights")
    return path


def test_files_of_a_dead_process_are_removed_with_its_list(folder: Path) -> None:
    listed, file = write_list(folder, BUFFER, "torch_4711_2_1"), buffer(folder)
    assert sweep_shared_memory() == [BUFFER]
    assert not file.exists() and not listed.exists()


def test_files_of_a_living_process_stay(folder: Path) -> None:
    listed, file = write_list(folder, BUFFER), buffer(folder)
    with listed.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sweep_shared_memory() == []
    assert file.exists() and listed.exists()


def test_names_outside_the_folder_and_of_other_forms_are_not_removed(
    folder: Path, tmp_path: Path
) -> None:
    precious = buffer(tmp_path, "precious")
    inside = [
        buffer(folder, name)
        for name in ("psm_1234", "sem.x", "torch_9_1_0", "torch_4711_1", "torch_4711_1_0x")
    ]
    up = os.path.relpath(precious, folder)
    write_list(
        folder,
        str(precious),
        up,
        f"{BUFFER}/../{up}",
        f"./{BUFFER}",
        *(path.name for path in inside),
    )
    buffer(folder)
    assert sweep_shared_memory() == []
    assert (
        precious.exists() and all(path.exists() for path in inside) and (folder / BUFFER).exists()
    )


def test_symbolic_and_hard_links_are_neither_read_nor_removed(folder: Path, tmp_path: Path) -> None:
    elsewhere = write_list(tmp_path, BUFFER, "torch_4711_2_0")
    link = folder / LIST
    link.symlink_to(elsewhere)
    hard = folder / "slime-weights-4711-ffffffff"
    os.link(elsewhere, hard)
    file = buffer(folder)
    assert sweep_shared_memory() == []
    assert link.is_symlink() and hard.exists() and file.exists()

    link.unlink()
    write_list(folder, BUFFER, "torch_4711_2_0")
    file.unlink()
    file.symlink_to(elsewhere)
    os.link(elsewhere, folder / "torch_4711_2_0")
    assert sweep_shared_memory() == []
    assert file.is_symlink() and (folder / "torch_4711_2_0").exists() and elsewhere.exists()


def test_what_is_no_file_does_not_stop_the_sweep(folder: Path) -> None:
    os.mkfifo(folder / "slime-weights-1-00000000")
    (folder / "slime-weights-2-00000000").mkdir()
    write_list(folder, BUFFER).write_bytes(b"\xff\x00\n" + BUFFER.encode())
    file = buffer(folder)
    assert sweep_shared_memory() == [BUFFER]
    assert not file.exists()


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_no_entry_names_a_file_elsewhere(entry: str) -> None:
    """Whatever matches is a base name."""
    if shared_memory.FILE_NAME.fullmatch(entry):
        assert os.path.basename(entry) == entry and entry.isascii() and entry.startswith("torch_")


def as_user(uid: int, call: Callable[[], object]) -> None:
    """Run ``call`` in a child process of that user; an exception there fails the test."""

    def run() -> None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        call()

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(30)
    assert child.exitcode == 0


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


@pytest.mark.real
@as_root
@pytest.mark.parametrize("sweeper", [0, VICTIM])
def test_another_users_list_removes_nothing_and_stops_nobody(folder: Path, sweeper: int) -> None:
    file = folder / BUFFER

    def plant() -> None:
        os.umask(0)
        write_list(folder, BUFFER)

    def sweep() -> None:
        assert sweep_shared_memory() == []

    as_user(sweeper or os.geteuid(), lambda: buffer(folder))
    as_user(OTHER_USER, plant)
    as_user(sweeper or os.geteuid(), sweep)
    assert file.exists() and (folder / LIST).exists()


@as_root
def test_another_users_file_under_a_name_of_ours_stays_and_is_no_error(folder: Path) -> None:
    as_user(OTHER_USER, lambda: buffer(folder))
    as_user(VICTIM, lambda: write_list(folder, BUFFER))

    def sweep() -> None:
        assert sweep_shared_memory() == []

    as_user(VICTIM, sweep)
    assert (folder / BUFFER).exists() and not (folder / LIST).exists()


def test_the_names_that_torch_and_slime_give_have_the_form(folder: Path) -> None:
    files = FileList()
    assert shared_memory.LIST_NAME.fullmatch(files.path.name)
    made = shared_memory.allocate(64, files)
    assert made.path is not None
    name = shared_memory.FILE_NAME.fullmatch(os.path.basename(made.path))
    assert name is not None and int(name["pid"]) == os.getpid()
    files.close()
    assert not files.path.exists()


def test_folders_of_dead_shared_memory_managers_are_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("dead00", "live00", "full00", "empty0", "young0", "stop00")
    dead, live, full, empty, young, stopped = folders = [
        folder / f"torch-shm-dir-{name}" for name in names
    ]
    for each in folders:
        each.mkdir()
    (full / "data").touch()
    (folder / "torch-shm-dir-link00").symlink_to(empty)
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for each, listener in zip((dead, live, stopped), sockets, strict=True):
        listener.bind(str(each / "manager.sock"))
        listener.listen(0)
    sockets[0].close()
    # a stopped manager accepts nobody, and others wait for it already
    waiting = socket.socket(socket.AF_UNIX)
    waiting.connect(str(stopped / "manager.sock"))
    monkeypatch.setattr(shared_memory, "CONNECT_SECONDS", 0.05)
    for each in folders:
        age = 0 if each == young else 30
        os.utime(each, (time.time() - age, time.time() - age))
    assert sorted(sweep_shared_memory()) == sorted([dead.name, empty.name])
    assert [each.exists() for each in folders] == [False, True, True, False, True, True]
    for open_socket in (*sockets, waiting):
        open_socket.close()
