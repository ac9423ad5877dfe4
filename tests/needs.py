"""What some tests need and not every machine has; without it they are skipped, with the reason."""

from __future__ import annotations

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
