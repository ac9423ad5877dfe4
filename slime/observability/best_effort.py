"""Writing of files that only people read: an error such as a full disk is logged and never ends the run."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)
_failures: Counter[str] = Counter()
_told: deque[str] = deque(maxlen=100)


@contextlib.contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Log an ``OSError`` of the block, the 1st, 2nd, 4th, 8th, ... time, and continue after the block.

    Args:
        what: the name of the files in the log, such as "the texts of samples".
    """
    try:
        yield
    except OSError as error:
        _failures[what] += 1
        count = _failures[what]
        if count & (count - 1) == 0:
            warn(f"{what} could not be written, {count} time(s) so far; the run continues: {error}")


def warn(message: str) -> None:
    """Log a warning, and keep it for :func:`take_warnings`."""
    logger.warning("%s", message)
    _told.append(message)


def take_warnings() -> list[str]:
    """The warnings of this process since the last call, at most the newest 100.

    The log of the rollout manager is a file; the driver shows these in the terminal.
    """
    taken: list[str] = []
    with contextlib.suppress(IndexError):
        while True:
            taken.append(_told.popleft())
    return taken


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file beside ``path`` to write to, which replaces ``path`` at the end of the block.

    When the block raises, ``path`` stays as it was, and what was written is removed: on a full disk it would take the
    last free space.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


class AppendedFile:
    """A file that stays open and grows by whole lines.

    Each line is one unbuffered write, so it survives the end of this process, by ``kill -9`` too. What a full disk
    refuses, also the rest of a line of which a part was written, waits in memory and is written before the next line:
    the file always is a beginning of what was appended, without a gap.

    Args:
        what: names the file in warnings.
        keep: bytes at the beginning of an existing file that stay; None: all of them.

    Attributes:
        end: bytes that the file has once nothing waits.

    Raises:
        OSError: the file cannot be opened. Later errors are only logged.
    """

    def __init__(self, path: Path, what: str, keep: int | None = None) -> None:
        self._what = what
        self._file = path.open("ab", buffering=0)  # a buffer of Python's would not tell how much of it was written
        if keep is not None:
            self._file.truncate(keep)
        self.end = os.fstat(self._file.fileno()).st_size
        self._unwritten = bytearray()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Bytes that could not be written yet."""
        return len(self._unwritten)

    def write(self, line: str) -> None:
        """Append a line, or several with line ends between them."""
        text = line.encode() + b"\n"
        with self._lock:
            self._unwritten += text
            self.end += len(text)
            self._flush()

    def _flush(self) -> None:
        with best_effort(self._what):
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]

    def sync(self) -> None:
        """Bring what was written to the disk itself, so that it survives the end of the machine. It may take a while;
        lines can be written meanwhile."""
        with best_effort(self._what):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Try once more to write what waits; safe to call twice."""
        with self._lock:
            if not self._file.closed:
                self._flush()
                with best_effort(self._what):
                    self._file.close()
