"""A file system of a few megabytes, to fill up."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 2**20


@contextmanager
def small_disk(folder: Path, mib: int, free: int) -> Iterator[Path]:
    """Mount a tmpfs of ``mib`` MiB at ``folder``, and fill it up to ``free`` MiB; skips the test where it cannot.

    Yields:
        The file that takes the room; remove it to make room.
    """
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"this user cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        ballast = folder / "ballast"
        ballast.write_bytes(bytes((mib - free) * MIB))
        yield ballast
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
