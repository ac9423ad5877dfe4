"""Write files that only people read: an error such as a full disk is logged and never ends the
run.
"""

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
    """Log an ``OSError`` of the block, the 1st, 2nd, 4th, 8th, ... time, and continue after the
    block.

    Args:
        what: The name of the files in the log, such as "the texts of samples".
    """
    try:
        yield
    except OSError as error:
        _failures[what] += 1
        count = _failures[what]
        # A full disk fails thousands of writes: the powers of two are told.
        if count & (count - 1) == 0:
            warn(f"{what} could not be written, {count} time(s) so far; the run continues: {error}")


def warn(message: str) -> None:
    """Log a warning, and keep it for :func:`take_warnings`."""
    logger.warning("%s", message)
    _told.append(message)


def take_warnings() -> list[str]:
    """Return the warnings of this process since the last call, at most the newest 100.

    The driver takes those of the rollout manager, whose log is a file, and shows them in the
    terminal.
    """
    taken: list[str] = []
    with contextlib.suppress(IndexError):
        while True:
            taken.append(_told.popleft())
    return taken


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file in the same folder, which replaces ``path`` at the end of
    the block.

    If the block raises, ``path`` is unchanged and the temporary file is removed; on a full disk it
    would occupy the last free space.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Also on KeyboardInterrupt: nobody else would remove the file.
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


class AppendedFile:
    """A file that stays open and to which whole lines are appended.

    Each line is one unbuffered write, so it survives the end of this process, even by ``kill -9``.
    If the disk is full, lines (or the rest of a partly written line) wait in memory and are written
    before the next line. So the file is always a prefix of the appended lines, without gaps.

    Args:
        what: The name of the file in warnings.
        keep: Number of bytes to keep at the beginning of an existing file; None keeps all.

    Attributes:
        end: Size of the file in bytes after all waiting bytes are written.

    Raises:
        OSError: The file cannot be opened. Later errors are only logged.
    """

    def __init__(self, path: Path, what: str, keep: int | None = None) -> None:
        self._what = what
        # after an error, a buffered file does not tell how much was written
        self._file = path.open("ab", buffering=0)
        if keep is not None:
            self._file.truncate(keep)
        self.end = os.fstat(self._file.fileno()).st_size
        self._unwritten = bytearray()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of bytes that could not be written yet."""
        return len(self._unwritten)

    def write(self, line: str) -> None:
        """Append one line, or several that are separated by newlines."""
        text = line.encode() + b"\n"
        with self._lock:
            self._unwritten += text
            self.end += len(text)
            self._flush()

    def _flush(self) -> None:
        with best_effort(self._what):
            # A full disk may take a part of a line: what was written is removed from the front, the
            # rest waits.
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]

    def sync(self) -> None:
        """Flush the written lines to the disk, so that they survive a crash of the machine. This
        can take long, so it does not hold the lock: other threads can append lines meanwhile."""
        with best_effort(self._what):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Try once more to write the waiting bytes, and close the file. It is safe to call this
        twice.
        """
        with self._lock:
            if not self._file.closed:
                self._flush()
                with best_effort(self._what):
                    self._file.close()
