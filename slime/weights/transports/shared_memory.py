"""Shared memory that is freed even if a process is killed, and that a GPU can copy from at full
speed.

torch removes a shared memory file after its last user has closed it, and its ``torch_shm_manager``
removes the files of killed processes. But this manager is a child of the trainer, and Ray kills the
children of a worker together with the worker. So each process also keeps a list of its files, which
is locked while the process lives. A later process of the same user that can lock such a list
removes the files in it.

Every user of the machine can create files in the shared memory folder. So a file is only read or
removed if it is a regular file of this process's effective user, has one link, and has a name of
the exact form. Symbolic links are never followed, and a file that cannot be opened or removed is
ignored.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


SHARED_MEMORY = "/dev/shm"
_LISTS = "slime-weights-"
LIST_NAME = re.compile(rf"{_LISTS}(?P<pid>[0-9]+)-[0-9a-f]{{8}}", re.ASCII)
MANAGER_FOLDERS = "torch-shm-dir-*"
MANAGER_AGE_SECONDS = 5.0
"""A manager creates its folder and listens in it at once. A younger folder may belong to one that
does so just now.
"""
CONNECT_SECONDS = 1.0
"""A stopped manager with a full backlog would never accept a connection."""
FILE_NAME = re.compile(r"torch_(?P<pid>[0-9]+)_[0-9]+_[0-9]+", re.ASCII)


@dataclass
class Buffer:
    """Memory that other processes can open.

    The file of shared memory is removed after its last user has closed it, unless a user dies
    without closing it.
    """

    flat: torch.Tensor  # uint8
    path: str | None = None  # the path of the file; None on CUDA


class Leftover:
    """The file of a buffer that an engine may have had open when it died."""

    def __init__(self, buffer: Buffer) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self.path = buffer.path
        self._storage = StorageWeakRef(buffer.flat.untyped_storage())

    def remove(self) -> bool:
        """Remove the file by its name. Return False and do nothing while this process still maps
        it, because torch ends a process whose file is missing."""
        if not self._storage.expired():
            return False
        if self.path is not None:
            _remove_own(os.path.basename(self.path))
        return True


class FileList:
    """A list of the files that this process creates, with a lock that ends with the process."""

    def __init__(self) -> None:
        while True:
            self.path = Path(SHARED_MEMORY) / f"{_LISTS}{os.getpid()}-{secrets.token_hex(4)}"
            self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND, 0o600)
            if _lock(self._fd) and os.fstat(self._fd).st_nlink:
                break
            os.close(self._fd)  # another process removed the list before it was locked
        # The list is not removed at exit, because it is not known then which files torch has
        # removed.
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
    """Allocate a buffer of ``size`` bytes that other processes can open by name.

    Raises:
        MemoryError: There is not enough shared memory.
    """
    import torch

    room = os.statvfs(SHARED_MEMORY)
    free = room.f_bavail * room.f_frsize
    # a write beyond the free space would kill this process without an error message
    if size > free:
        raise MemoryError(
            f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free, but a bucket of weights needs "
            f"{size / 2**20:.0f} MiB: enlarge it, lower --update-weight-buffer-size, or use "
            "--update-weight-transport disk"
        )
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    name = storage._share_filename_cpu_()[1].decode().lstrip("/")
    files.add(name)
    return Buffer(
        torch.empty(0, dtype=torch.uint8).set_(storage), os.path.join(SHARED_MEMORY, name)
    )


def sweep_shared_memory() -> list[str]:
    """Remove the files that dead processes of this user left, and the folders of dead
    ``torch_shm_manager``s; returns the names of both.

    This is cheap, and safe at any time: see the module for the files that are never read or
    removed.
    """
    removed = []
    for name in os.listdir(SHARED_MEMORY):
        listed = LIST_NAME.fullmatch(name)
        if listed is None:
            continue
        try:
            # Another user may have created a FIFO. Without O_NONBLOCK, opening it would wait for a
            # writer.
            fd = os.open(
                os.path.join(SHARED_MEMORY, name),
                os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            )
        # the file was removed meanwhile, belongs to another user, or is a symbolic link
        except OSError:
            continue
        try:
            if _is_own_file(os.fstat(fd)) and _lock(fd):
                removed += _remove_listed(fd, listed["pid"])
                _remove_own(name)
        finally:
            os.close(fd)
    for folder in Path(tempfile.gettempdir()).glob(MANAGER_FOLDERS):
        # another run has removed it meanwhile, or its manager does not answer
        with contextlib.suppress(OSError):
            if _manager_is_gone(folder):
                shutil.rmtree(folder)
                removed.append(folder.name)
    return removed


def _manager_is_gone(folder: Path) -> bool:
    """Whether this is the folder of a ``torch_shm_manager`` of this user that was killed: its
    socket is left in it.
    """
    status = folder.lstat()
    old = time.time() - status.st_mtime > MANAGER_AGE_SECONDS
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    # A manager's folder holds nothing but its socket. One with anything else in it is left alone.
    if not (old and ours and os.listdir(folder) in ([], ["manager.sock"])):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_SECONDS)
        try:
            probe.connect(str(folder / "manager.sock"))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
    return False


def _remove_listed(fd: int, pid: str) -> list[str]:
    """Remove the files of process ``pid`` that an open list names, and return the names of the
    removed files.
    """
    with open(fd, encoding="ascii", errors="replace", closefd=False) as file:
        entries = file.read().split()
    ours = [
        entry for entry in entries if (form := FILE_NAME.fullmatch(entry)) and form["pid"] == pid
    ]
    return [entry for entry in ours if _remove_own(entry)]


def is_buffer_of_ours(name: str) -> bool:
    """Return whether a base name is that of a shared memory file of torch that belongs to this
    user.
    """
    try:
        return bool(FILE_NAME.fullmatch(name)) and _is_own_file(
            os.lstat(os.path.join(SHARED_MEMORY, name))
        )
    except OSError:
        return False


def _remove_own(name: str) -> bool:
    """Remove a file of the shared memory folder by its base name, if it is a regular file of this
    user with one link.

    Only this user can replace the file between the check and the removal, because the folder has
    the sticky bit.
    """
    path = os.path.join(SHARED_MEMORY, name)
    try:
        if not _is_own_file(os.lstat(path)):
            return False
        os.unlink(path)
    except OSError:  # the file was removed meanwhile, or this process may not remove it
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


logger = logging.getLogger(__name__)


class HostMemory(Protocol):
    """An object with a buffer in host memory."""

    flat: torch.Tensor  # uint8


def pin(owner: HostMemory, device: torch.device) -> bool:
    """Page-lock the buffer of an object in this process while the object exists. Return whether
    this succeeded.

    Every process that maps shared memory must register its own mapping, although the pages exist
    only once. If CUDA refuses, the memory stays pageable, which is correct but slower.

    Args:
        device: The device to or from which the buffer is copied. Nothing happens unless it is a
            CUDA device.
    """
    if device.type != "cuda" or not owner.flat.numel():
        return False
    runtime = cuda_runtime()
    storage = owner.flat.untyped_storage()
    code = int(runtime.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
    if code:
        logger.warning(
            "cudaHostRegister of %.0f MiB of shared memory failed (error %d): weight updates are "
            "copied at the lower speed of pageable memory", storage.nbytes() / 2**20, code,
        )  # fmt: skip
        clear_error(device)
        return False
    # The finalizer holds a reference to the storage, so the memory stays mapped until it is
    # unregistered. It does not run at exit: then the driver releases everything, and CUDA may have
    # been shut down already.
    weakref.finalize(owner, _unpin, runtime, storage).atexit = False
    return True


def _unpin(runtime: ModuleType, storage: torch.UntypedStorage) -> None:
    synchronize()  # a copy from this memory may still be running
    code = int(runtime.cudaHostUnregister(storage.data_ptr()))
    if code:
        logger.warning("cudaHostUnregister failed (error %d)", code)


def cuda_runtime() -> ModuleType:
    """Return the bindings of the CUDA runtime, which pin memory that exists already."""
    import torch

    return torch.cuda.cudart()


def synchronize() -> None:
    """Wait for the work of the current CUDA device."""
    import torch

    torch.cuda.synchronize()


def clear_error(device: torch.device) -> None:
    """Clear the error of a failed call, which the CUDA runtime keeps and torch raises after the
    next kernel launch.
    """
    import torch

    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        logger.debug("the error of cudaHostRegister was cleared")
