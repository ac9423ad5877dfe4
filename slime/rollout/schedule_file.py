"""The file of a schedule (:mod:`slime.rollout.weight_timeline`): lines that are never lost without a word."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from slime.observability.best_effort import AppendedFile, warn

ScheduleLine: TypeAlias = dict[str, Any]
"""One line: a JSON object whose keys the docstring of :mod:`slime.rollout.weight_timeline` lists."""
MOST_WAITING = 64 * 2**20
"""Bytes of lines that wait in memory while the disk is full: some 600,000 lines."""


class ScheduleError(ValueError):
    """A schedule cannot be read, or this run cannot repeat it; the message says what differs."""


def lost_beside(path: Path) -> Path:
    """Where a schedule is moved when lines of it are lost: ``schedule.lost.jsonl`` for ``schedule.jsonl``."""
    return path.with_name(f"{path.stem}.lost{path.suffix}")


class ScheduleFile:
    """Appends lines to a schedule and keeps them exact.

    The file is open all the time. A line is written when it is appended, by one call and without a buffer, so a
    process that is killed loses none; a snapshot brings the lines before it to the disk itself (:meth:`sync`). While
    the disk is full, lines wait in memory (:class:`~slime.observability.best_effort.AppendedFile`). So the file always
    is a beginning of the schedule without a gap, and repeating it is exact as far as it goes.

    Where lines are lost all the same (more of them wait than :data:`MOST_WAITING`, or a resume finds fewer than its
    snapshot speaks of), the beginning is moved to ``schedule.lost.jsonl``, and a warning says so. Nothing in here
    raises an ``OSError``.

    Args:
        position: bytes of the file that a snapshot speaks of; what came after is cut off. None: a new file.
    """

    def __init__(self, path: Path, position: int | None) -> None:
        self.path = path
        self._file: AppendedFile | None = None
        size = path.stat().st_size if path.is_file() else None
        if position is not None and size is None:  # resumed in another folder
            warn(f"{path} begins with this resume: --replay-schedule with it needs --load of the same snapshot")
            position = None
        if position is not None and size is not None and size < position:
            self._lose(f"the snapshot speaks of {position} bytes of it, and it has {size}")
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
            self._lose(f"{self._file.waiting} bytes of it wait for room on the disk")

    def position(self) -> int | None:
        """Bytes up to here, also those that wait for room; None where the schedule is lost."""
        return self._file.end if self._file is not None else None

    def sync(self) -> None:
        """Bring what is written to the disk itself: a snapshot is about to speak of it."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Write what waits, if there is room by now; safe to call twice."""
        if self._file is None:
            return
        self._file.close()
        if self._file.waiting:
            self._lose(f"{self._file.waiting} bytes of it were waiting for room on the disk when the run ended")
        self._file = None

    def _lose(self, why: str) -> None:
        self._file = None
        with contextlib.suppress(OSError):  # a rename needs no room on the disk
            self.path.replace(lost_beside(self.path))
        warn(
            f"lines of {self.path} are lost: {why}. --replay-schedule cannot repeat this run exactly any more; "
            f"{lost_beside(self.path).name} holds what came before the loss"
        )


def read_lines(path: Path) -> Iterator[ScheduleLine]:
    """The lines of a schedule. A last line that was cut in the middle, as by a kill, is left out.

    Raises:
        ScheduleError: there is no such file, or a line is no JSON object.
    """
    if not path.is_file():
        lost = lost_beside(path)
        instead = "a run writes outputs/<run>/schedule.jsonl"
        if lost.is_file():
            instead = f"{lost.name} beside it is a schedule whose end was lost; it repeats the run up to there"
        raise ScheduleError(f"--replay-schedule {path} does not exist; {instead}")
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise ValueError("no JSON object")
            except ValueError as error:
                if text.endswith(b"\n"):
                    raise ScheduleError(f"--replay-schedule {path}, line {number}: {error}") from error
                return
            yield line
