"""The file of a schedule (:mod:`slime.rollout.weight_timeline`). No line is lost without a
warning.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from slime.observability.files import AppendedFile, warn

ScheduleLine: TypeAlias = dict[str, Any]
"""One line: a JSON object. The docstring of :mod:`slime.rollout.weight_timeline` lists the kinds of
lines.
"""
MOST_WAITING = 64 * 2**20
"""Maximum number of bytes that wait in memory while the disk is full: about 600,000 lines."""


class ScheduleError(ValueError):
    """A schedule cannot be read, or this run cannot repeat it. The message says why."""


def lost_beside(path: Path) -> Path:
    """Return the path to which an incomplete schedule is moved: ``schedule.lost.jsonl`` for
    ``schedule.jsonl``.
    """
    return path.with_name(f"{path.stem}.lost{path.suffix}")


class ScheduleFile:
    """Appends lines to a schedule, such that the file is always a prefix of the schedule without a
    gap.

    Each line is written immediately, with one unbuffered call, so a process that is killed loses no
    line. A snapshot also flushes the lines before it to the disk (:meth:`sync`). While the disk is
    full, lines wait in memory (:class:`~slime.observability.files.AppendedFile`). A replay of
    the file is therefore exact as far as the file goes.

    If lines are lost nevertheless (more than :data:`MOST_WAITING` bytes wait, or the file is
    shorter than the snapshot says from which the run is resumed), the file is moved to
    ``schedule.lost.jsonl`` with a warning. No method raises an ``OSError``, since a full disk must
    not end the run.

    Args:
        path: The file.
        position: Length in bytes of the file when the snapshot was made from which the run is
            resumed. The rest of the file is removed. None: Start a new file.
    """

    def __init__(self, path: Path, position: int | None) -> None:
        self.path = path
        self._file: AppendedFile | None = None
        if position is not None and not path.is_file():  # the run is resumed in another folder
            warn(
                f"{path} begins with this resume, so --replay-schedule, which repeats whole runs, "
                "cannot use it"
            )
            position = None
        elif position and (problem := _cannot_continue(path, position)):
            self._lose(problem)
            position = None
        self.is_new = position is None
        try:
            self._file = AppendedFile(path, "the schedule of the run", keep=position or 0)
        except OSError as error:
            self._lose(str(error))

    def append(self, line: Mapping[str, object]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps(line, separators=(",", ":")))
        if self._file.waiting > MOST_WAITING:
            self._lose(f"{self._file.waiting} bytes of it wait for space on the disk")

    def position(self) -> int | None:
        """Length of the schedule in bytes, including lines that wait for disk space. None if lines
        were lost.
        """
        return self._file.end if self._file is not None else None

    def sync(self) -> None:
        """Flush the written lines to the disk, because a snapshot is about to record
        :meth:`position`.
        """
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Write the waiting lines if there is space now, and close the file. It may be called
        twice.
        """
        if self._file is None:
            return
        self._file.close()
        if self._file.waiting:
            self._lose(
                f"{self._file.waiting} bytes of it were waiting for space on the disk when the "
                "run ended"
            )
        self._file = None

    def _lose(self, why: str) -> None:
        self._file = None
        # a rename needs no disk space, so it works on a full disk too
        with contextlib.suppress(OSError):
            self.path.replace(lost_beside(self.path))
        warn(
            f"lines of {self.path} are lost: {why}. --replay-schedule cannot repeat this run "
            f"exactly any more; {lost_beside(self.path).name} holds what came before the loss"
        )


def _cannot_continue(path: Path, position: int) -> str:
    """Explain why the file is not that of the snapshot; empty if a line ends at ``position``."""
    with path.open("rb") as file:
        file.seek(position - 1)
        last = file.read(1)
    if not last:
        size = path.stat().st_size
        return f"it has {size} bytes, but it had {position} bytes when the snapshot was made"
    middle = f"byte {position} is in the middle of a line, so it is the file of another run"
    return "" if last == b"\n" else middle


def read_lines(path: Path) -> Iterator[ScheduleLine]:
    """Yield the lines of a schedule. An incomplete last line, which a killed process can leave, is
    skipped.

    Raises:
        ScheduleError: The file does not exist, or a line is not a JSON object.
    """
    if not path.is_file():
        lost = lost_beside(path)
        instead = "a run writes outputs/<run>/schedule.jsonl"
        if lost.is_file():
            instead = (
                f"{lost.name} in the same folder is a schedule whose end was lost; it repeats the "
                "run up to there"
            )
        raise ScheduleError(f"--replay-schedule {path} does not exist; {instead}")
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise ValueError("it is not a JSON object")
            except ValueError as error:
                if text.endswith(b"\n"):
                    raise ScheduleError(
                        f"--replay-schedule {path}, line {number}: {error}"
                    ) from error
                return
            yield line
