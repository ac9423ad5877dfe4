"""The files of lines that a run appends to, followed while it goes on: metrics, the load of its
engines, its ledger.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from math import inf, nan
from pathlib import Path

import numpy as np
import orjson

from slime.observability.files import LONGEST_LINE, regular, shallow
from slime.types import JsonObject

from ..summary import Report, read_ledger

MARK = 64
"""So many bytes before the position are compared, to notice that the file was cut and written
again.
"""
STEP_KEYS = ("rollout/step", "eval/step", "train/step")
CURVE_POINTS = 1000
POINTS = 600
"""At most so many points of a curve, and of the load of each engine, go to the browser."""
_MOST_CHANGES = 200


class Tail:
    """Returns the complete lines that were added to a file since the last call.

    A resume of a run replaces ``metrics.jsonl``, and cuts ``ledger.jsonl`` before it appends to it
    again. In both cases the file is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = self._offset = 0
        self._mark = b""

    def read(self) -> tuple[bool, list[bytes]]:
        """Return whether what was read before is no longer valid, and the new lines. A missing file
        has none.
        """
        restarted = False
        lines: list[bytes] = []
        try:
            with regular(self.path).open("rb") as file:
                inode = self.path.stat().st_ino
                file.seek(self._offset - len(self._mark))
                if inode != self._inode or file.read(len(self._mark)) != self._mark:
                    restarted = self._restart()
                    self._inode = inode
                # Whole lines in pieces. A line that is longer than a piece is waited for, and never
                # read.
                while True:
                    file.seek(self._offset)
                    data = file.read(LONGEST_LINE)
                    complete = data[: data.rfind(b"\n") + 1]
                    if not complete:
                        return restarted, lines
                    self._offset += len(complete)
                    self._mark = (self._mark + complete)[-MARK:]
                    lines += [line for line in complete.split(b"\n") if line]
        except OSError:
            return self._restart(), []

    def _restart(self) -> bool:
        had = self._offset > 0
        self._inode = self._offset = 0
        self._mark = b""
        return had


class Followed:
    """A file of JSON lines, of which :meth:`refresh` reads what is new. It is thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail = Tail(path)
        self._lock = threading.Lock()
        self.unreadable = 0
        self.version = 0  # grows with every change
        self._clear()

    def refresh(self) -> None:
        """Read what the run has written since the last call."""
        with self._lock:
            restarted, lines = self._tail.read()
            if restarted:
                self.unreadable = 0
                self._clear()
            for line in lines:
                try:
                    self._add(shallow(orjson.loads(line)))
                except (ValueError, TypeError, LookupError, AttributeError, StopIteration):
                    # such as the last line of a run that was killed while it wrote
                    self.unreadable += 1
            self.version += bool(restarted or lines)

    def _clear(self) -> None:
        """Forget everything that was read."""
        raise NotImplementedError

    def _add(self, row: JsonObject) -> None:
        """Take a line. Errors of its form are counted."""
        raise NotImplementedError


@dataclass
class Column:
    """The values of one metric, in the order of the file; a value that was not finite is NaN."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


class Series(Followed):
    """The metrics of a run as columns, from ``metrics.jsonl``."""

    def _clear(self) -> None:
        self._columns: dict[str, Column] = {}
        self.steps = 0  # number of rows of training steps
        self.last_step = -1
        self.first_time = self.last_time = 0.0

    def _add(self, row: JsonObject) -> None:
        # A row counts in the unit of its key: rollouts, evaluations or optimizer steps.
        key = next(key for key in STEP_KEYS if key in row)
        step = _number(row.pop(key))
        moment = _number(row.pop("time", 0.0))
        began = moment - _number(row.get("perf/step_time") or 0.0)
        if key == "rollout/step":
            self.steps += 1
            self.last_step = max(self.last_step, int(step))
        self.first_time = self.first_time or began
        self.last_time = moment
        for name, value in row.items():
            column = self._columns.setdefault(name, Column())
            column.steps.append(step)
            column.times.append(moment)
            column.values.append(value if isinstance(value, int | float) else nan)

    @property
    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._columns)

    def at(self, step: int) -> dict[str, float | None]:
        """Return the metrics of a training step or evaluation by name, without those of other
        steps.
        """
        values: dict[str, float | None] = {}
        with self._lock:
            for name, column in sorted(self._columns.items()):
                place = bisect_left(column.steps, step)
                if place < len(column.steps) and column.steps[place] == step:
                    values[name] = _or_none(column.values[place])
        return values

    def latest(self, name: str) -> float | None:
        """Return the last value of a metric; None if there is none, or if it is not finite."""
        with self._lock:
            column = self._columns.get(name)
            return _or_none(column.values[-1]) if column else None

    def total(self, name: str) -> float:
        """Return the sum of a metric over all steps."""
        with self._lock:
            column = self._columns.get(name)
            return sum(value for value in column.values if value == value) if column else 0.0

    def curve(self, name: str, points: int = CURVE_POINTS) -> dict[str, object] | None:
        """Return a metric as at most ``points`` points; None if the run has no such metric.

        If there are more values, neighbours are joined: ``values`` are then means, and ``low`` and
        ``high`` the extreme values. Times are seconds since the first step of the run began.
        """
        with self._lock:
            column = self._columns.get(name)
            if column is None:
                return None
            steps, times, values = (
                np.array(part) for part in (column.steps, column.times, column.values)
            )
            start = self.first_time
        curve: dict[str, object] = {"name": name, "count": len(values)}
        if len(values) > points:
            # Neighbours are joined to equal stretches, of which NaN has no part.
            edges = np.linspace(0, len(values), points + 1).astype(int)[:-1]
            finite = np.isfinite(values)
            counts = np.add.reduceat(finite.astype(float), edges)
            sums = np.add.reduceat(np.where(finite, values, 0.0), edges)
            curve["low"] = numbers(np.minimum.reduceat(np.where(finite, values, np.inf), edges))
            curve["high"] = numbers(np.maximum.reduceat(np.where(finite, values, -np.inf), edges))
            with np.errstate(invalid="ignore", divide="ignore"):
                values = sums / counts  # NaN where no value is finite
            steps = steps[edges]
            times = times[edges]
        moments = np.round(times - start, 2).tolist()
        return curve | {"steps": steps.tolist(), "times": moments, "values": numbers(values)}


def _number(value: object) -> float:
    return float(value)  # type: ignore[arg-type]  # of a line that anyone may have written; a TypeError is counted


def _or_none(value: float) -> float | None:
    return None if value != value else value


def numbers(values: np.ndarray) -> list[float | None]:
    """Return numbers for JSON with six significant digits, and None for those that are not
    finite.
    """
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


@dataclass
class EngineColumns:
    """What one engine said. A number is NaN where the engine was not asked or did not answer.

    Attributes:
        changes: Wall time and name of each new state; a pause during a weight update is none.
    """

    times: array[float] = field(default_factory=lambda: array("d"))
    numbers: tuple[array[float], ...] = field(
        default_factory=lambda: (array("d"), array("d"), array("d"))
    )
    changes: list[tuple[float, str]] = field(default_factory=list)
    state: str = ""
    silent: int = 0


class EngineLoads(Followed):
    """The load and the state of each engine over the run, from ``engines.jsonl``."""

    def _clear(self) -> None:
        self._engines: dict[int, EngineColumns] = {}

    def _add(self, row: JsonObject) -> None:
        moment = _number(row["time"])
        engines = row["engines"]
        for index, state, *loads in engines if isinstance(engines, list) else ():  # type: ignore[misc, str-unpack]
            engine = self._engines.setdefault(int(_number(index)), EngineColumns())
            engine.times.append(moment)
            for column, value in zip(engine.numbers, loads, strict=True):
                column.append(nan if value is None else _number(value))
            engine.state = str(state)
            engine.silent += state == "silent"
            # A pause is part of each weight update and would hide the other changes.
            if state != "paused" and (not engine.changes or engine.changes[-1][1] != state):
                engine.changes.append((moment, str(state)))

    def values(self, start: float) -> list[dict[str, object]]:
        """Return each engine with at most :data:`POINTS` points; of more, the largest value in each
        stretch remains.

        Args:
            start: Wall time from which seconds are counted, 0 if it is not known. Engines that were
                asked before it, as in the first step of a run, move it to the first time at which
                one was asked.
        """
        with self._lock:
            start = min([start or inf, *(engine.times[0] for engine in self._engines.values())])
            return [_load(index, engine, start) for index, engine in sorted(self._engines.items())]


def _load(index: int, engine: EngineColumns, start: float) -> dict[str, object]:
    # Peaks matter more than means: a queue that was full for a moment.
    count = len(engine.times)
    stretch = max(-(-count // POINTS), 1)
    starts = range(0, count, stretch)
    columns = [[_largest(column[at : at + stretch]) for at in starts] for column in engine.numbers]
    running = [value for value in engine.numbers[0] if value == value]
    return {
        "name": f"engine {index}",
        "state": engine.state,
        "asked": count,
        "silent": engine.silent,
        "busy": sum(value > 0 for value in running) / len(running) if running else None,
        "times": [round(engine.times[at] - start, 1) for at in starts],
        **dict(zip(("running", "waiting", "tokens"), columns, strict=True)),
        "changes": [
            [round(moment - start, 1), state] for moment, state in engine.changes[-_MOST_CHANGES:]
        ],
    }


def _largest(values: array[float]) -> float | None:
    return max((value for value in values if value == value), default=None)


class Ledger(Followed):
    """The newest row of each prompt group in ``ledger.jsonl``, and the line of the last
    snapshot.
    """

    def _clear(self) -> None:
        self.rows: dict[int, JsonObject] = {}
        self.cut: JsonObject | None = None
        self.of_rollout: dict[int, list[int]] = {}
        self._report: tuple[tuple[int, int], Report] | None = None

    def report(self) -> Report:
        """Return what ``slime ledger`` says of the file. It is read again only if it has changed.

        Raises:
            FileNotFoundError: There is no ledger.
        """
        # The report reads the whole file, so it is kept while the file is the same.
        status = self.path.stat()
        stamp = status.st_mtime_ns, status.st_size
        if self._report is None or self._report[0] != stamp:
            try:
                self._report = stamp, read_ledger(regular(self.path))
            except OSError as error:
                self._report = (
                    stamp,
                    Report(problems=[f"it cannot be read: {error.strerror or error}"]),
                )
        return self._report[1]

    def _add(self, row: JsonObject) -> None:
        group = row.get("group")
        rollout = row.get("rollout")
        if isinstance(group, int):
            self.rows[group] = row
            # A group comes again with a later state, in the same or another rollout.
            if isinstance(rollout, int):
                self.of_rollout.setdefault(rollout, []).append(group)
        elif "cut" in row:
            self.cut = row
