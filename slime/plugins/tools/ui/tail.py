"""Read a file that another process appends to, a few lines at a time."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from slime.observability.regular import LONGEST_LINE, regular

MARK = 64
"""So many bytes before the position are compared, to notice that the file was cut and written again."""


class Tail:
    """Returns the complete lines that were added to a file since the last call.

    A resume of a run replaces ``metrics.jsonl``, and cuts ``ledger.jsonl`` before it appends to it again. In both cases
    the file is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode, self._offset, self._mark = 0, 0, b""

    def read(self) -> tuple[bool, list[bytes]]:
        """Return whether what was read before is no longer valid, and the new lines. A missing file has none."""
        try:
            file = regular(self.path).open("rb")
        except OSError:
            return self._restart(), []
        with file:
            inode = self._identity()
            restarted = False
            if inode != self._inode or not self._still_there(file.read, file.seek):
                restarted = self._restart()
                self._inode = inode
            lines: list[bytes] = []
            while complete := self._piece(file):
                self._offset += len(complete)
                self._mark = (self._mark + complete)[-MARK:]
                lines += [line for line in complete.split(b"\n") if line]
        return restarted, lines

    def _piece(self, file: BinaryIO) -> bytes:
        """Return the next complete lines; none if there are no more, or if a line is longer than is read."""
        file.seek(self._offset)
        data = file.read(LONGEST_LINE)
        return data[: data.rfind(b"\n") + 1]

    def _identity(self) -> int:
        try:
            return self.path.stat().st_ino
        except OSError:
            return -1

    def _still_there(self, read: object, seek: object) -> bool:
        assert callable(read) and callable(seek)
        seek(self._offset - len(self._mark))
        return bool(read(len(self._mark)) == self._mark)

    def _restart(self) -> bool:
        had = self._offset > 0
        self._inode, self._offset, self._mark = 0, 0, b""
        return had
