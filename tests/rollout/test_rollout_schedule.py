"""The log of an asynchronous run's schedule, and its repetition."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.data.sample import Sample
from slime.rollout.schedule import SETTINGS, Recording, Schedule, ScheduleError, comparable


def arguments(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: None for name in SETTINGS}, **values)


def answer(spans: list[tuple[str, int]], tokens: int, end: str = "stop") -> dict[str, Any]:
    """An engine's: ``spans`` are (version, first token)."""
    parts = [{"version": version, "start": start} for version, start in spans]
    logprobs = [[-0.5, 7, None]] * tokens
    meta = {"weight_version": spans[-1][0], "weight_versions": parts, "output_token_logprobs": logprobs}
    return {"text": "x" * tokens, "meta_info": {**meta, "finish_reason": {"type": end}}}


def ask(schedule: Schedule, sample: Sample, reply: dict[str, Any], bodies: list[dict[str, Any]]) -> Any:
    async def send(body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body)
        return reply

    return schedule.ask(sample, {"sampling_params": {"max_new_tokens": 32}}, send)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two samples: one answer over two versions; one cut off, once without a token, then finished."""
    path = tmp_path / "schedule.jsonl"

    async def record() -> None:
        schedule = Schedule(path, arguments(), None, 0, None)
        await schedule.reached(0)
        first, second = Sample(group_index=0, index=0), Sample(group_index=0, index=1)
        schedule("started", [first, second], {})
        await ask(schedule, first, answer([("0.0", 0), ("0.2", 5)], 9), [])
        for turn, (version, tokens, end) in enumerate([("0.0", 3, "abort"), ("0.1", 0, "abort"), ("0.2", 4, "length")]):
            second.weight_versions = [""] * turn
            await ask(schedule, second, answer([(version, 0)], tokens, end), [])
        schedule("accepted", [first, second], {"rollout_id": 0})

    asyncio.run(record())
    return path


def test_the_log_says_at_which_token_weights_take_over(recorded: Path) -> None:
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert lines[0] == {"settings": comparable(arguments())}
    assert lines[1] == {"started": 0, "step": 0}
    one = {"request": 0, "group": 0, "turn": 0, "spans": [[0, 0], [5, 2]], "tokens": 9, "kv_kept": False, "end": "stop"}
    assert lines[2] == one
    assert [(line["turn"], line["tokens"], line["end"]) for line in lines[3:6]] == [
        (0, 3, "abort"), (1, 0, "abort"), (2, 4, "length"),
    ]  # fmt: skip
    assert lines[6] == {"judged": "accepted", "group": 0, "rollout": 0}
    recording = Recording(recorded, comparable(arguments()))
    assert [recording.due(step) for step in range(3)] == [1, 2, 4]
    assert [recording.divided(step) for step in range(3)] == [1, 1, 0]
    assert recording.rollout_step == {0: 0}


def test_a_replay_asks_when_and_for_as_much_as_was_recorded(recorded: Path, tmp_path: Path) -> None:
    async def replay() -> None:
        recording = Recording(recorded, comparable(arguments()))
        schedule = Schedule(tmp_path / "again.jsonl", arguments(), recording, 3, None)
        await schedule.reached(0)
        first, second = Sample(group_index=0, index=0), Sample(group_index=0, index=1)
        bodies: list[dict[str, Any]] = []
        assert schedule.missing(0) == "0 of 1 recorded requests are over, and 0 of 1 wait for newer weights"
        cut = await ask(schedule, second, answer([("3.0", 0)], 3, "length"), bodies)
        assert bodies[0]["sampling_params"]["max_new_tokens"] == 3
        assert cut["meta_info"]["finish_reason"] == {"type": "abort"}
        assert schedule.missing(0) is not None and schedule.missing(1) is None

        second.weight_versions = ["3.0"]
        waiting = asyncio.ensure_future(ask(schedule, second, answer([("never", 0)], 1), bodies))
        await asyncio.sleep(0)
        assert not waiting.done()
        await schedule.reached(1)
        empty = await waiting
        assert len(bodies) == 1 and empty["meta_info"]["weight_version"] == "3.1"
        assert empty["meta_info"]["output_token_logprobs"] == []

        await schedule.reached(2)
        await ask(schedule, first, answer([("3.0", 0), ("3.2", 5)], 9), bodies)
        assert bodies[1]["weight_version_plan"] == [[0, "3.0"], [5, "3.2"]]
        assert bodies[1]["sampling_params"]["max_new_tokens"] == 32  # it ended by itself

    asyncio.run(replay())


def test_samples_made_again_replace_what_was_logged(recorded: Path) -> None:
    with open(recorded, "a") as file:
        file.write(json.dumps({"request": 1, "group": 0, "turn": 0, "spans": [[0, 4]], "tokens": 8, "end": "stop"}))
    recording = Recording(recorded, comparable(arguments()))
    assert sorted(recording.requests) == [(0, 0), (1, 0)]
    assert recording.requests[1, 0].first == 4


def test_a_resume_cuts_off_what_the_snapshot_does_not_know(recorded: Path) -> None:
    lines = recorded.read_text().splitlines(keepends=True)
    Schedule(recorded, arguments(), None, 1, len("".join(lines[:3])))
    assert recorded.read_text() == "".join(lines[:3])
    Schedule(recorded, arguments(), None, 1, 10**6)  # the file is not that of the snapshot
    assert recorded.read_text().count("\n") == 1


def test_what_cannot_be_replayed_is_said(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="async_buffer_size: None -> 4"):
        Recording(recorded, {**comparable(arguments()), "async_buffer_size": 4})
    with pytest.raises(ScheduleError, match="does not exist"):
        Recording(tmp_path / "none.jsonl", {})
    (tmp_path / "other.jsonl").write_text('{"group": 3}\n')
    with pytest.raises(ScheduleError, match="not a schedule"):
        Recording(tmp_path / "other.jsonl", {})
