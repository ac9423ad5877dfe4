"""Removes files that killed servers leave behind.

SGLang keeps the load counters of each server in a shared memory file, and torch's shared memory manager has a socket in
a folder of its own. Both are only removed when their process ends gracefully.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LEAST_AGE_SECONDS = 60.0  # A younger file may be about to be opened.
MANAGER_AGE_SECONDS = 5.0  # A manager creates its folder and listens in it at once, so a run sweeps its own at its end.
CONNECT_SECONDS = 1.0  # A stopped manager with a full backlog would never accept a connection.
_LOADS = re.compile(r"sglang_loads_\w+\.shm", re.ASCII)
MANAGERS = re.compile(r"torch-shm-dir-\w{6}", re.ASCII)
_SOCKET = "manager.sock"


def sweep_leftovers() -> list[str]:
    """Remove the files of this user that no process uses any more; returns their paths."""
    removed = [str(path) for path in own_entries(SHARED_MEMORY, _LOADS, stat.S_ISREG, LEAST_AGE_SECONDS)]
    if removed:
        used = _mapped(removed)
        removed = [path for path in removed if path not in used and _unlink(path)]
    folders = own_entries(Path(tempfile.gettempdir()), MANAGERS, stat.S_ISDIR, MANAGER_AGE_SECONDS)
    return removed + [str(folder) for folder in folders if _remove_manager(folder)]


def own_entries(folder: Path, name: re.Pattern[str], is_kind: Callable[[int], bool], age: float) -> list[Path]:
    """Entries of ``folder`` with such a name that this user created more than ``age`` seconds ago."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                old = time.time() - facts.st_mtime > age
                ours = facts.st_uid == os.geteuid() and is_kind(facts.st_mode)
                if name.fullmatch(entry.name) and ours and old:
                    found.append(Path(entry.path))
    return found


def _mapped(paths: list[str]) -> set[str]:
    """The ``paths`` that a process has mapped or open. Only processes of this user and of root can open them."""
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text()
            used |= {path for path in paths if path in maps}
        with contextlib.suppress(OSError):
            for handle in os.scandir(process / "fd"):
                with contextlib.suppress(OSError):
                    used.add(os.readlink(handle.path))
    return used


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _remove_manager(folder: Path) -> bool:
    """Remove the folder of a shared memory manager, unless the manager still accepts connections."""
    try:
        entries = {entry.name for entry in folder.iterdir()}
    except OSError:  # Another run has removed it meanwhile.
        return False
    # The folder of a manager holds nothing but its socket. If there is anything else, leave it alone.
    if entries - {_SOCKET}:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_SECONDS)
        # The socket's file outlives a killed manager; only a refused connection shows that the manager is gone.
        try:
            probe.connect(str(folder / _SOCKET))
        except (ConnectionRefusedError, FileNotFoundError):
            pass
        except OSError:  # For example a timeout, which says nothing about whether the manager lives.
            return False
        else:
            return False
    _unlink(str(folder / _SOCKET))
    with contextlib.suppress(OSError):
        folder.rmdir()
        return True
    return False
