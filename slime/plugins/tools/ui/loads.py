"""The load and the state of each engine over the run, from ``engines.jsonl``."""

from __future__ import annotations

import threading
from array import array
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import orjson

from slime.plugins.tools.ui.tail import Tail

POINTS = 600
"""At most so many points of each engine go to the browser."""
_MOST_CHANGES = 200
_AWAY = float("nan")


@dataclass
class EngineColumns:
    """What one engine said. A number is NaN where the engine was not asked or did not answer.

    Attributes:
        changes: Wall time and name of each new state; a pause during a weight update is none.
    """

    times: array[float] = field(default_factory=lambda: array("d"))
    numbers: tuple[array[float], ...] = field(default_factory=lambda: (array("d"), array("d"), array("d")))
    changes: list[tuple[float, str]] = field(default_factory=list)
    state: str = ""
    silent: int = 0


class EngineLoads:
    """The columns of a run's ``engines.jsonl``, extended while the run goes on. It is thread-safe."""

    def __init__(self, path: Path) -> None:
        self._tail, self._lock = Tail(path), threading.Lock()
        self._engines: dict[int, EngineColumns] = {}

    def refresh(self) -> None:
        with self._lock:
            restarted, lines = self._tail.read()
            if restarted:
                self._engines.clear()
            for line in lines:
                try:
                    row = orjson.loads(line)
                    for index, state, *numbers in row["engines"]:
                        self._add(float(row["time"]), int(index), str(state), numbers)
                except (ValueError, TypeError, KeyError):
                    continue  # a line of a run that was killed while it wrote

    def _add(self, moment: float, index: int, state: str, numbers: list[float | None]) -> None:
        engine = self._engines.setdefault(index, EngineColumns())
        engine.times.append(moment)
        for column, value in zip(engine.numbers, numbers, strict=True):
            column.append(_AWAY if value is None else value)
        engine.silent += state == "silent"
        if state != "paused" and (not engine.changes or engine.changes[-1][1] != state):
            engine.changes.append((moment, state))
        engine.state = state

    def values(self, start: float) -> list[dict[str, object]]:
        """Return each engine with at most :data:`POINTS` points; of more, the largest value in each stretch remains.

        Args:
            start: Wall time from which seconds are counted, 0 if it is not known. Engines that were asked before it, as
                in the first step of a run, move it to the first time at which one was asked.
        """
        with self._lock:
            start = min([start or inf, *(engine.times[0] for engine in self._engines.values())])
            return [_values(index, engine, start) for index, engine in sorted(self._engines.items())]


def _values(index: int, engine: EngineColumns, start: float) -> dict[str, object]:
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
        "changes": [[round(moment - start, 1), state] for moment, state in engine.changes[-_MOST_CHANGES:]],
    }


def _largest(values: array[float]) -> float | None:
    return max((value for value in values if value == value), default=None)
