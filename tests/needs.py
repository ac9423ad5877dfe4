"""What some tests need and not every machine has; without it they are skipped, with the reason."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

MIB = 2**20


def needs_transformers(release: str, why: str) -> None:
    """Skip the test with an older release; slime itself supports those from 5.10 on, which SGLang's may pin."""
    if Version(transformers.__version__) < Version(release):
        pytest.skip(f"needs transformers {release} or newer: {why}")


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """Mount a tmpfs of ``mib`` MiB at ``folder``, and yield the folder; skips the test where it cannot."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"this user cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, free: int) -> Path:
    """Fill the file system of a folder up to ``free`` MiB, and return the file that takes the room."""
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(folder).free - free * MIB))
    return ballast
