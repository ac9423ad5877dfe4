"""The load of engines over a run, from ``engines.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path

from slime.plugins.tools.ui.follow import POINTS, EngineLoads


def write(path: Path, rows: list[tuple[float, list[list[object]]]]) -> None:
    with path.open("a") as file:
        file.writelines(
            json.dumps({"time": moment, "engines": engines}) + "\n" for moment, engines in rows
        )


def test_each_engine_with_its_changes_and_what_it_did_not_answer(tmp_path: Path) -> None:
    path = tmp_path / "engines.jsonl"
    loads = EngineLoads(path)
    loads.refresh()
    assert loads.values(100.0) == []
    write(path, [(100.0, [[0, "serving", 3, 1, 50]]), (101.0, [[0, "paused", None, None, None]])])
    write(path, [(102.0, [[0, "serving", 0, 0, 0]]), (103.0, [[0, "silent", None, None, None]])])
    with path.open("a") as file:
        file.write('{"time": 104, "engines": [[0, "ser\n[]\n{"time": 1}\n')
    loads.refresh()
    write(path, [(105.0, [[0, "lost", None, None, None], [1, "serving", 2, 0, 9]])])
    loads.refresh()
    first, second = loads.values(100.0)
    assert first == {
        "name": "engine 0", "state": "lost", "asked": 5, "silent": 1, "busy": 0.5,
        "times": [0.0, 1.0, 2.0, 3.0, 5.0], "running": [3, None, 0, None, None], "waiting": [1, None, 0, None, None],
        "tokens": [50, None, 0, None, None], "changes": [[0.0, "serving"], [3.0, "silent"], [5.0, "lost"]],
    }  # fmt: skip
    assert second["name"] == "engine 1" and second["busy"] == 1.0


def test_seconds_are_counted_from_the_first_step_on(tmp_path: Path) -> None:
    path = tmp_path / "engines.jsonl"
    write(
        path,
        [
            (1.7e9 + moment, [[0, "serving" if moment else "starting", 1, 0, 0]])
            for moment in (0, 60, 120)
        ],
    )
    loads = EngineLoads(path)
    loads.refresh()
    # No step has ended yet; the first one has; the first request was late.
    for first_row, times in (
        (0.0, [0, 60, 120]),
        (1.7e9 + 90, [0, 60, 120]),
        (1.7e9 - 10, [10, 70, 130]),
    ):
        (engine,) = loads.values(first_row)
        assert engine["times"] == times and engine["changes"] == [
            [times[0], "starting"],
            [times[1], "serving"],
        ]


def test_a_long_run_keeps_its_peaks(tmp_path: Path) -> None:
    path = tmp_path / "engines.jsonl"
    write(
        path,
        [(float(i), [[0, "serving", 99 if i == 7777 else i % 3, 0, 0]]) for i in range(20_000)],
    )
    loads = EngineLoads(path)
    loads.refresh()
    (engine,) = loads.values(0.0)
    assert isinstance(engine["running"], list) and isinstance(engine["times"], list)
    assert len(engine["running"]) == len(engine["times"]) <= POINTS and max(engine["running"]) == 99
