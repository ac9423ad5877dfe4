"""The lanes of a step's time line, and the sentences about who waited for whom, from a planted
trace.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from slime.observability.trace_file import Load, load_events, phase_events, trace_of
from slime.plugins.tools.ui.timeline import MOST_PROCESSES, timeline


def load(moment: float, engine: int, running: int | None, waiting: int | None = 0) -> Load:
    return Load(
        time=moment, engine=engine, state="serving", running=running, waiting=waiting, tokens=0
    )


def plant(
    folder: Path, phases: list[dict[str, Any]], loads: list[Load], samples: bool = True
) -> dict[str, Any]:
    """Write the trace of step 0, whose only sample runs from second 0 to 4, and return its time
    line.
    """
    rows = list(phase_events(phases)) + list(load_events(loads))  # type: ignore[arg-type]
    if samples:
        rows.append(
            {
                "ph": "X",
                "name": "sglang_generate",
                "ts": 0.0,
                "dur": 4e6,
                "pid": 1,
                "tid": 0,
                "args": {},
            }
        )
    path = trace_of(folder, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": rows}).encode()))
    found = timeline(folder, 0)
    assert found is not None
    return found


def phase(name: str, start: float, end: float, process: str | None = None) -> dict[str, Any]:
    return {"name": name, "start": start, "end": end} | ({"process": process} if process else {})


STEP = [phase("rollout", 0, 4), phase("train", 4, 9), phase("update_weights", 9, 10)]


def test_each_rank_and_each_engine_has_a_lane(tmp_path: Path) -> None:
    ranks = [phase("actor_train", 4.5, 9, f"actor rank {rank}") for rank in (0, 1)]
    values = plant(tmp_path, STEP + ranks, [load(t, e, 3 - e - t if t < 3 - e else 0, 1) for e in (0, 1) for t in range(4)])  # fmt: skip  # noqa: E501
    assert [name for name, _, _ in values["phases"]] == ["rollout", "train", "update_weights"], (
        "those of the driver"
    )
    assert [(one["name"], one["busy"], one["spans"]) for one in values["processes"]] == [
        (f"actor rank {rank}", 0.45, [["actor_train", 4.5, 9.0]]) for rank in (0, 1)
    ]
    assert [(one["name"], one["busy"]) for one in values["engines"]] == [
        ("engine 0", 0.75),
        ("engine 1", 0.5),
    ]
    assert values["engines"][1]["loads"] == [[0.0, 2, 1], [1.0, 1, 1], [2.0, 0, 1], [3.0, 0, 1]]


def test_the_notes_say_for_what_ranks_waited(tmp_path: Path) -> None:
    ranks = [
        phase("actor_train", 4.5, 9, "actor rank 0"),
        phase("get_batch", 4.25, 4.75, "actor rank 0"),
    ]
    notes = plant(tmp_path, STEP + ranks, [])["notes"]
    assert (
        "Of 10.00 s, a training rank worked 4.75 s and waited 5.25 s: 4.00 s in rollout, 1.00 s "
        "in update_weights, 0.25 s in train." in notes
    )


def test_time_that_no_phase_explains_is_said(tmp_path: Path) -> None:
    notes = plant(tmp_path, [phase("rollout", 0, 4), phase("train", 7, 9), phase("train", 7, 9, "actor rank 0")], [])["notes"]  # fmt: skip  # noqa: E501
    assert any(
        note.endswith("4.00 s in rollout, 3.00 s between phases of the driver.") for note in notes
    )


def test_the_rank_and_the_engine_for_which_others_wait_are_named(tmp_path: Path) -> None:
    ranks = [
        phase("actor_train", 4 + late, 9, f"actor rank {rank}")
        for rank, late in enumerate((0.0, 2.0, 0.5))
    ]
    loads = [load(t, engine, int(t < 1 + 2 * engine)) for engine in (0, 1) for t in range(5)]
    notes = plant(tmp_path, STEP + ranks, loads)["notes"]
    assert "actor rank 1 was the last to begin actor_train, 2.00 s after actor rank 0." in notes
    assert "engine 0 ran its last request 2.0 s before engine 1." in notes


def test_an_engine_that_ran_no_request_had_no_last_one(tmp_path: Path) -> None:
    loads = [load(t, engine, int(engine and t < 3)) for engine in (0, 1) for t in range(5)]
    notes = plant(tmp_path, STEP, loads)["notes"]
    assert "engine 0 ran no request; engine 1 ran its last one after 2.0 s." in notes
    assert not any("engine 0 ran its last" in note for note in notes)


def test_of_many_ranks_some_are_drawn_and_the_notes_are_of_all(tmp_path: Path) -> None:
    ranks = [phase("train", 4 + (rank == 77), 9, f"actor rank {rank}") for rank in range(200)]
    values = plant(tmp_path, STEP + ranks, [load(1.0, engine, 1) for engine in range(100)])
    assert len(values["processes"]) <= MOST_PROCESSES and len(values["engines"]) <= MOST_PROCESSES
    assert values["more"] == 200 - MOST_PROCESSES
    assert any(note.startswith("actor rank 77 was the last") for note in values["notes"])


@pytest.mark.parametrize("lanes", [[], [phase("train", 4, 9, "actor rank 0")]])
def test_a_trace_without_engines_or_ranks(tmp_path: Path, lanes: list[dict[str, Any]]) -> None:
    values = plant(tmp_path, STEP + lanes, [], samples=False)
    assert values["engines"] == [] and len(values["processes"]) == len(lanes)
