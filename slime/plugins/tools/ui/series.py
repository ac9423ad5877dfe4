"""The metrics of a run as columns, read once from ``metrics.jsonl`` and extended while the run goes on."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson

from slime.plugins.tools.ui.tail import Tail

STEP_KEYS = ("rollout/step", "eval/step", "train/step")
POINTS = 1000
"""At most so many points of a curve go to the browser."""


@dataclass
class Column:
    """The values of one metric, in the order of the file; a value that was not finite is NaN."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


class Series:
    """The columns of a ``metrics.jsonl``. It is thread-safe."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._lock = threading.Lock()
        self._columns: dict[str, Column] = {}
        self.unreadable = 0
        self.version = 0  # grows with every change
        self.steps = 0  # number of rows of training steps
        self.first_time = self.last_time = 0.0
        self.last_step = -1

    def refresh(self) -> None:
        """Read what the run has written since the last call."""
        with self._lock:
            restarted, lines = self._tail.read()
            if restarted:
                self._columns.clear()
                self.steps, self.last_step, self.unreadable, self.first_time = 0, -1, 0, 0.0
            for line in lines:
                self._add(line)
            self.version += bool(restarted or lines)

    def _add(self, line: bytes) -> None:
        try:
            row = orjson.loads(line)
            key = next(key for key in STEP_KEYS if key in row)
            step, moment = float(row.pop(key)), float(row.pop("time", 0.0))
            began = moment - float(row.get("perf/step_time") or 0.0)
        except (ValueError, TypeError, AttributeError, StopIteration):
            self.unreadable += 1
            return
        if key == "rollout/step":
            self.steps += 1
            self.last_step = max(self.last_step, int(step))
        self.first_time = self.first_time or began
        self.last_time = moment
        columns = self._columns
        for name, value in row.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = Column()
            column.steps.append(step)
            column.times.append(moment)
            column.values.append(value if isinstance(value, int | float) else float("nan"))

    @property
    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._columns)

    def at(self, step: int) -> dict[str, float | None]:
        """Return the metrics of a training step or evaluation by name, without those of other steps."""
        found: dict[str, float | None] = {}
        with self._lock:
            for name, column in sorted(self._columns.items()):
                place = bisect_left(column.steps, step)
                if place < len(column.steps) and column.steps[place] == step:
                    value = column.values[place]
                    found[name] = None if value != value else value
        return found

    def latest(self, name: str) -> float | None:
        """Return the last value of a metric; None if there is none, or if it is not finite."""
        with self._lock:
            column = self._columns.get(name)
            value = column.values[-1] if column else float("nan")
        return None if value != value else value

    def total(self, name: str) -> float:
        """Return the sum of a metric over all steps."""
        with self._lock:
            column = self._columns.get(name)
            return sum(value for value in column.values if value == value) if column else 0.0

    def curve(self, name: str, points: int = POINTS) -> dict[str, object] | None:
        """Return a metric as at most ``points`` points; None if the run has no such metric.

        If there are more values, neighbours are joined: ``values`` are then means, and ``low`` and ``high`` the extreme
        values. Times are seconds since the first step of the run began.
        """
        with self._lock:
            column = self._columns.get(name)
            if column is None:
                return None
            steps, times, values = (np.array(part) for part in (column.steps, column.times, column.values))
            start = self.first_time
        result: dict[str, object] = {"name": name, "count": len(values)}
        low = high = None
        if len(values) > points:
            edges = np.linspace(0, len(values), points + 1).astype(int)[:-1]
            finite = np.isfinite(values)
            counts = np.add.reduceat(finite.astype(float), edges)
            sums = np.add.reduceat(np.where(finite, values, 0.0), edges)
            low = np.minimum.reduceat(np.where(finite, values, np.inf), edges)
            high = np.maximum.reduceat(np.where(finite, values, -np.inf), edges)
            with np.errstate(invalid="ignore", divide="ignore"):
                values = sums / counts  # NaN where no value is finite
            steps, times = steps[edges], times[edges]
        result |= {"steps": steps.tolist(), "times": np.round(times - start, 2).tolist(), "values": numbers(values)}
        if low is not None and high is not None:
            result |= {"low": numbers(low), "high": numbers(high)}
        return result


def numbers(values: np.ndarray) -> list[float | None]:
    """Return numbers for JSON with six significant digits, and None for those that are not finite."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]
