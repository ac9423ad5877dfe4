"""The folders of a run: the locks that let only one run at a time write to them, and the snapshots
in them.

Two runs of one name would mix their metrics, and each would delete the snapshot that the other is
writing as the remains of an interrupted save. A driver locks the folders of its run. A lock ends
with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path

from slime.checkpoint.snapshot import Snapshot, latest, snapshots
from slime.config.run import other_folder

RUN_LOCKS = ".locks"
"""The folder in ``--output-dir`` with the lock of each run; not in the run's folder, which a later
run renames.
"""
SAVE_LOCK = ".lock"
_HOLDER = "process "


class FolderInUse(RuntimeError):
    """Another run writes to a folder. The message names both, and says what to do."""


class FolderLock:
    """A lock on a file. A file system without locks, or a folder that cannot be written, is not
    locked.

    Raises:
        FolderInUse: Another process, or another run of this one, holds the lock.
    """

    def __init__(self, file: Path, what: str, advice: str) -> None:
        self._descriptor: int | None = None
        # Whoever writes to the folder next reports better what is wrong with it.
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            if not _foreign(file):
                self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        lock = self._descriptor
        if _foreign(file, lock):
            self.release()
            raise FolderInUse(
                f"{what} cannot be locked: {file} is no lock of slime but a link or another file: "
                "remove it"
            )
        if lock is None:
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 1000).decode(errors="replace").strip()
            self.release()
            raise FolderInUse(
                f"{what} is in use by a run that has not ended ({holder or 'unknown process'}): "
                f"end that run first, or {advice}"
            ) from None
        except OSError:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
            os.write(lock, f"{_HOLDER}{os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        """Give the lock back; safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _foreign(file: Path, descriptor: int | None = None) -> bool:
    """Whether a file is not a lock: writing to it would change a file that somebody else's folder
    points to.
    """
    if file.is_symlink() or (file.parent.name == RUN_LOCKS and file.parent.is_symlink()):
        return True
    if descriptor is None:
        return False
    status = os.fstat(descriptor)
    plain = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1
    return not plain or os.pread(descriptor, len(_HOLDER), 0) not in (b"", _HOLDER.encode())


def lock_run(root: Path, name: str) -> FolderLock:
    """Lock the folder of a run in ``root``, before it is created: that of an earlier run of the
    name is renamed then.

    Raises:
        FolderInUse: That run has not ended.
    """
    return FolderLock(
        root / RUN_LOCKS / name,
        f"the folder {root / name}",
        "give this one another --run-name",
    )


def lock_save(folder: str) -> FolderLock:
    """Lock a folder of snapshots.

    Raises:
        FolderInUse: A run that has not ended writes snapshots there.
    """
    return FolderLock(Path(folder) / SAVE_LOCK, f"--save {folder}", "name another folder")


def snapshot_of(load: str | None, step: int | None = None, digests: bool = True) -> Snapshot | None:
    """Return the snapshot that ``--load`` names; None if it names weights, also those of
    Megatron-LM.

    Args:
        step, digests: As for :func:`slime.checkpoint.snapshot.latest`.

    Raises:
        SnapshotError: As :func:`slime.checkpoint.snapshot.latest`.
    """
    if load is None or other_folder(load, step):
        return None
    return latest(Path(load).expanduser(), step, digests)


def snapshots_of(save: Path) -> list[Path]:
    """Return the folders of the snapshots in ``--save``, the one that was committed last at the
    end.
    """
    return [one.path for one in sorted(snapshots(save), key=lambda one: one.manifest["sequence"])]
