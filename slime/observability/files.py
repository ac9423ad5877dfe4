"""Files of a run that only people read.

What is read of a folder that somebody else may have made is bounded in size and depth. When a file
is written, an error such as a full disk is logged and never ends the run.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import stat
import threading
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.data.plain_values import MOST_NESTED, too_deep

MOST_BYTES = 2**31
"""So many bytes of a file, or of what a compressed one holds, are read at most."""
MOST_SETTINGS = 2**22
LONGEST_LINE = 2**26
DEEPEST = MOST_NESTED
"""So many levels may settings and rows be nested. Deeper ones overflow the stack of a parser or of
a writer.
"""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def regular(path: Path, most: int = MOST_BYTES) -> Path:
    """Return ``path``, unless reading it would wait for another process or never end, as with a
    pipe or a device.

    Raises:
        OSError: There is no such file, it has more than ``most`` bytes, or it is neither a regular
            file nor a folder (which cannot be opened either).
    """
    status = os.stat(path)
    # Files of the kernel call themselves regular, but have no end, or do something when they are
    # read.
    of_kernel = any(
        os.path.isdir(place) and os.stat(place).st_dev == status.st_dev
        for place in ("/proc", "/sys")
    )
    if of_kernel or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    if status.st_size > most and stat.S_ISREG(status.st_mode):
        raise OSError(errno.EFBIG, f"It has more than {most:,} bytes", str(path))
    return path


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is not valid, or is nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return shallow(value)


def shallow(value: object) -> Any:
    """Return a value of JSON types, unless it is nested more than :data:`DEEPEST` levels deep.

    Raises:
        ValueError: It is.
    """
    if too_deep(value):
        raise ValueError("it is nested too deeply")
    return value


def parse_settings(text: str) -> Any:
    """Return the value of a YAML text, whose size the caller has bounded.

    Raises:
        ValueError: It is not valid, is nested too deeply, or has aliases, which can stand for any
            number of values.
        yaml.YAMLError: It is not valid.
    """
    import yaml

    # The C parser is ten times faster, but has no limit of depth: it overflows the stack.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has an alias (*{event.anchor})")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
    return yaml.load(text, Loader=loader)


def shown(text: object) -> str:
    """Return a text for the terminal: control characters, with which it can be commanded, are
    replaced.
    """
    return _UNPRINTABLE.sub("�", str(text))


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


def _keep(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.WARNING:
        _told.append(record.getMessage())
    return True


# Also those of data sets, whose room may not import this one.
for _place in (__name__, "slime.data.dataset", "slime.data.source"):
    logging.getLogger(_place).addFilter(_keep)


def warn(message: str) -> None:
    """Log a warning, which :func:`take_warnings` returns."""
    logger.warning(shown(message))


def take_warnings() -> list[str]:
    """Return the warnings of this process since the last call, at most the newest 100.

    The driver takes those of the rollout manager, whose log is a file, and shows them in the
    terminal.
    """
    # Other threads may add one meanwhile.
    return [_told.popleft() for _ in range(len(_told))]


def untaken_warnings() -> list[str]:
    """Return the warnings that the next :func:`take_warnings` will return."""
    return list(_told.copy())


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
