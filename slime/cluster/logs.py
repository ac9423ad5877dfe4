"""Redirects the output of each actor to a file of its own in the run directory."""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _LogFile(io.RawIOBase):
    """A file descriptor whose writes never fail: on a full disk, the output is lost, but the run continues."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return memoryview(data).nbytes


def _stream(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(_LogFile(descriptor)), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def redirect_output(log_dir: Path, name: str) -> None:
    """Send stdout and stderr of this process, including those of C libraries, to ``log_dir/name.log``.

    ``print`` does not fail on a full disk, not even in users' functions.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / f"{name}.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True)
