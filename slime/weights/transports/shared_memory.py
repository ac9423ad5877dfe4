"""Shared memory that is given back, also by processes that were killed.

torch removes a shared memory file with its last user, and its ``torch_shm_manager`` removes what a killed
process leaves. But that manager is a child of the trainer, and Ray kills the children of a worker together
with it. So each process also keeps a list of its files, locked for as long as it lives; whoever can lock such
a list removes the files in it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = "/dev/shm"
_LISTS = "slime-weights-"


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
            Path(self.path).unlink(missing_ok=True)
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
    path.unlink(missing_ok=True)
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
    """Remove the files of processes that are gone; returns their names. Cheap, and safe at any time."""
    removed = []
    for path in Path(SHARED_MEMORY).glob(f"{_LISTS}*"):
        try:
            fd = os.open(path, os.O_RDWR)
        except (FileNotFoundError, PermissionError):  # gone meanwhile, or another user's
            continue
        try:
            if not _lock(fd):
                continue
            for name in path.read_text().split():
                file = Path(SHARED_MEMORY) / name
                if file.exists():
                    file.unlink(missing_ok=True)
                    removed.append(name)
            path.unlink(missing_ok=True)
        finally:
            os.close(fd)
    return removed


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
