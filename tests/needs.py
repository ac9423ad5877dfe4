"""What some tests need and not every machine has, without which they are skipped, with the reason;
and how many cases of many a test tries."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

MIB = 2**20
ALL = os.environ.get("SLIME_TESTS") == "long"
"""Whether the tests of the long circle run (``scripts/test_all.sh``), which try all cases."""


def of_all(whole: int, part: int) -> int:
    """How many cases of many to try: ``part`` of them at each commit, the ``whole`` in the long
    circle.
    """
    return whole if ALL else part


def needs_transformers(release: str, why: str) -> None:
    """Skip the test with an older release; slime itself supports those from 5.10 on, which SGLang's
    may pin.
    """
    if Version(version("transformers")) < Version(release):
        pytest.skip(f"needs transformers {release} or newer: {why}")


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """Mount a tmpfs of ``mib`` MiB at ``folder``, and yield the folder; skips the test where it
    cannot.
    """
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"this user cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, free: int) -> Path:
    """Fill the file system of a folder up to ``free`` MiB, and return the file that takes the
    room.
    """
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(folder).free - free * MIB))
    return ballast
