"""Shared memory that is given back, also by processes that were killed.

torch removes a shared memory file with its last user, and its ``torch_shm_manager`` removes what a killed
process leaves. But that manager is a child of the trainer, and Ray kills the children of a worker together
with it. So each process also keeps a list of its files, locked for as long as it lives; a later process of the
same user that can lock such a list removes the files in it.

Every user of the machine can create files in the shared memory folder. Therefore only regular files that belong to
this process's effective user, have one link and carry a name of the exact form are read or removed, symbolic links
are never followed, and a file that cannot be opened or removed is left alone.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = "/dev/shm"
_LISTS = "slime-weights-"
_LIST_NAME = re.compile(rf"{_LISTS}(?P<pid>[0-9]+)-[0-9a-f]{{8}}", re.ASCII)
_FILE_NAME = re.compile(r"torch_(?P<pid>[0-9]+)_[0-9]+_[0-9]+", re.ASCII)


@dataclass
class Buffer:
    """Memory that other processes can open.

    Shared memory is a file that goes away with its last user, as long as none of them dies with a reference.
    """

    flat: torch.Tensor  # uint8
    path: str | None = None  # of the file; None on CUDA


class Leftover:
    """The file of a buffer that an engine may have died with."""

    def __init__(self, buffer: Buffer) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self.path = buffer.path
        self._storage = StorageWeakRef(buffer.flat.untyped_storage())

    def remove(self) -> bool:
        """Remove it by name. False while this process still maps it: torch ends a process that finds its file
        gone."""
        if not self._storage.expired():
            return False
        if self.path is not None:
            _remove_own(os.path.basename(self.path))
        return True


class FileList:
    """Names of the files that this process makes, under a lock that ends with the process."""

    def __init__(self) -> None:
        while True:
            self.path = Path(SHARED_MEMORY) / f"{_LISTS}{os.getpid()}-{secrets.token_hex(4)}"
            self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND, 0o600)
            if _lock(self._fd) and os.fstat(self._fd).st_nlink:
                break
            os.close(self._fd)  # somebody swept it between the two lines
        # Not at exit: there is no telling then which files torch has removed.
        self._end = weakref.finalize(self, _remove_list, self.path, self._fd)
        self._end.atexit = False

    def add(self, path: str) -> None:
        os.write(self._fd, f"{os.path.basename(path)}\n".encode())

    def close(self) -> None:
        self._end()


def _remove_list(path: Path, fd: int) -> None:
    _remove_own(path.name)
    os.close(fd)


def allocate(size: int, files: FileList) -> Buffer:
    """A buffer of ``size`` bytes that other processes open by name.

    Raises:
        MemoryError: there is not enough shared memory.
    """
    import torch

    room = os.statvfs(SHARED_MEMORY)
    free = room.f_bavail * room.f_frsize
    if size > free:  # writing past the end of the file system would kill this process without a word
        raise MemoryError(
            f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB left, a bucket of weights needs {size / 2**20:.0f} MiB: "
            "make it larger, lower --update-weight-buffer-size, or use --update-weight-transport disk"
        )
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    name = storage._share_filename_cpu_()[1].decode().lstrip("/")
    files.add(name)
    return Buffer(torch.empty(0, dtype=torch.uint8).set_(storage), os.path.join(SHARED_MEMORY, name))


def sweep_shared_memory() -> list[str]:
    """Remove the files that dead processes of this user left behind; returns their names.

    Cheap, and safe at any time: see the module for what is never read or removed.
    """
    removed = []
    for name in os.listdir(SHARED_MEMORY):
        listed = _LIST_NAME.fullmatch(name)
        if listed is None:
            continue
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for a writer.
            fd = os.open(os.path.join(SHARED_MEMORY, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # removed meanwhile, another user's, or a symbolic link
            continue
        try:
            if _is_own_file(os.fstat(fd)) and _lock(fd):
                removed += _remove_listed(fd, listed["pid"])
                _remove_own(name)
        finally:
            os.close(fd)
    return removed


def _remove_listed(fd: int, pid: str) -> list[str]:
    """Remove the files of process ``pid`` that an open list names; returns the names of those that were there."""
    with open(fd, encoding="ascii", errors="replace", closefd=False) as file:
        entries = file.read().split()
    ours = [entry for entry in entries if (form := _FILE_NAME.fullmatch(entry)) and form["pid"] == pid]
    return [entry for entry in ours if _remove_own(entry)]


def is_buffer_of_ours(name: str) -> bool:
    """Whether a base name is that of torch's shared memory, in a file of this user."""
    try:
        return bool(_FILE_NAME.fullmatch(name)) and _is_own_file(os.lstat(os.path.join(SHARED_MEMORY, name)))
    except OSError:
        return False


def _remove_own(name: str) -> bool:
    """Remove a file of the shared memory folder by its base name, if it is a regular file of this user with one link.

    Whoever may replace it between the check and the removal is this user: the folder is sticky.
    """
    path = os.path.join(SHARED_MEMORY, name)
    try:
        if not _is_own_file(os.lstat(path)):
            return False
        os.unlink(path)
    except OSError:  # removed meanwhile, or not ours to remove
        return False
    return True


def _is_own_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
