"""The log of an asynchronous run's schedule, and its repetition."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_args import make_args

from slime.config.args import Args
from slime.data.sample import Sample
from slime.observability import files
from slime.observability.files import take_warnings
from slime.rollout.schedule_file import ScheduleError, ScheduleFile, lost_beside, read_lines
from slime.rollout.weight_timeline import Recording, WeightTimeline, settings_to_compare


def arguments(**values: Any) -> Args:
    return make_args().with_values(**values)


def answer(spans: list[tuple[str, int]], tokens: int, end: str = "stop") -> dict[str, Any]:
    """An engine's: ``spans`` are (version, first token)."""
    parts = [{"version": version, "start": start} for version, start in spans]
    logprobs = [[-0.5, 7, None]] * tokens
    meta = {
        "weight_version": spans[-1][0],
        "weight_versions": parts,
        "output_token_logprobs": logprobs,
    }
    return {"text": "x" * tokens, "meta_info": {**meta, "finish_reason": {"type": end}}}


def ask(
    schedule: WeightTimeline, sample: Sample, reply: dict[str, Any], bodies: list[dict[str, Any]]
) -> Any:
    async def send(body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body)
        return reply

    return schedule.ask(sample, {"sampling_params": {"max_new_tokens": 32}}, send)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two samples: one answer over two versions; one cut off, once without a token, then
    finished.
    """
    path = tmp_path / "schedule.jsonl"

    async def record() -> None:
        schedule = WeightTimeline(path, settings_to_compare(arguments()), None, 0, None)
        await schedule.reached(0)
        first, second = Sample(group_index=0, index=0), Sample(group_index=0, index=1)
        schedule("started", [first, second], {})
        await ask(schedule, first, answer([("0.0", 0), ("0.2", 5)], 9), [])
        for turn, (version, tokens, end) in enumerate(
            [("0.0", 3, "abort"), ("0.1", 0, "abort"), ("0.2", 4, "length")]
        ):
            second.weight_versions = [""] * turn
            await ask(schedule, second, answer([(version, 0)], tokens, end), [])
        schedule("accepted", [first, second], {"rollout_id": 0})

    asyncio.run(record())
    return path


def test_the_log_says_at_which_token_weights_take_over(recorded: Path) -> None:
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert lines[0] == {"settings": settings_to_compare(arguments())}
    assert lines[1] == {"started": 0, "step": 0}
    one = {
        "request": 0,
        "group": 0,
        "turn": 0,
        "spans": [[0, 0], [5, 2]],
        "tokens": 9,
        "kv_kept": False,
        "end": "stop",
    }
    assert lines[2] == one
    assert [(line["turn"], line["tokens"], line["end"]) for line in lines[3:6]] == [
        (0, 3, "abort"), (1, 0, "abort"), (2, 4, "length"),
    ]  # fmt: skip
    assert lines[6] == {"judged": "accepted", "group": 0, "rollout": 0}
    recording = Recording(recorded, settings_to_compare(arguments()))
    assert [recording.due(step) for step in range(3)] == [1, 2, 4]
    assert [recording.divided(step) for step in range(3)] == [1, 1, 0]
    assert recording.rollout_step == {0: 0}


def test_a_replay_asks_when_and_for_as_much_as_was_recorded(recorded: Path, tmp_path: Path) -> None:
    async def replay() -> None:
        recording = Recording(recorded, settings_to_compare(arguments()))
        schedule = WeightTimeline(
            tmp_path / "again.jsonl", settings_to_compare(arguments()), recording, 3, None
        )
        await schedule.reached(0)
        first, second = Sample(group_index=0, index=0), Sample(group_index=0, index=1)
        bodies: list[dict[str, Any]] = []
        assert (
            schedule.missing(0)
            == "0 of 1 recorded requests are finished, and 0 of 1 wait for newer weights"
        )
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
        file.write(
            json.dumps(
                {"request": 1, "group": 0, "turn": 0, "spans": [[0, 4]], "tokens": 8, "end": "stop"}
            )
        )
    recording = Recording(recorded, settings_to_compare(arguments()))
    assert sorted(recording.requests) == [(0, 0), (1, 0)]
    assert recording.requests[1, 0].first == 4


def test_a_resume_cuts_off_what_the_snapshot_does_not_know(recorded: Path) -> None:
    lines = recorded.read_text().splitlines(keepends=True)
    WeightTimeline(recorded, settings_to_compare(arguments()), None, 1, len("".join(lines[:3])))
    assert recorded.read_text() == "".join(lines[:3])
    # the file is not that of the snapshot
    WeightTimeline(recorded, settings_to_compare(arguments()), None, 1, 10**6)
    assert recorded.read_text().count("\n") == 1 and lost_beside(recorded).read_text() == "".join(
        lines[:3]
    )


def test_what_cannot_be_replayed_is_said(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="async_buffer_size: 1 -> 4"):
        Recording(recorded, {**settings_to_compare(arguments()), "async_buffer_size": 4})
    with pytest.raises(ScheduleError, match="does not exist"):
        Recording(tmp_path / "none.jsonl", {})
    (tmp_path / "other.jsonl").write_text('{"group": 3}\n')
    with pytest.raises(ScheduleError, match="not a schedule"):
        Recording(tmp_path / "other.jsonl", {})


# --- the file: kills, full disks, losses
# -----------------------------------------------------------


LINES = [
    {"request": i, "group": i // 2, "turn": 0, "spans": [[0, i // 8]], "tokens": 3, "end": "stop"}
    for i in range(64)
]


@pytest.fixture(autouse=True)
def no_warning_yet() -> None:
    files._failures.clear()
    take_warnings()


@given(st.integers(0, 200), st.integers(0, 40))
def test_a_schedule_cut_at_any_byte_repeats_what_is_whole(cut: int, resumed_at: int) -> None:
    """As a kill in the middle of a line leaves it, and a loss of power, which does not keep all
    bytes.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.jsonl"
        file = ScheduleFile(path, None)
        file.append({"settings": settings_to_compare(arguments())})
        for line in LINES[:8]:
            file.append(line)
        whole = path.read_bytes()
        keep = max(len(whole) - cut, whole.index(b"\n") + 1)
        os.truncate(path, keep)
        # without its end a line is whole
        count = whole[:keep].count(b"\n") - 1 + whole.startswith(b"\n", keep)
        assert sorted(Recording(path, {}).requests) == [(i, 0) for i in range(count)]
        lines = [line for line in whole[:keep].splitlines(keepends=True) if line.endswith(b"\n")]
        position = len(b"".join(lines[: 1 + resumed_at % max(len(lines) - 1, 1)]))
        assert not ScheduleFile(path, position).is_new and path.read_bytes() == whole[:position]
        assert take_warnings() == []


def test_a_line_that_is_broken_in_the_middle_of_the_file_is_named(recorded: Path) -> None:
    lines = recorded.read_bytes().splitlines(keepends=True)
    recorded.write_bytes(b"".join([*lines[:3], b'{"request": 1, "gr\n', *lines[3:]]))
    with pytest.raises(ScheduleError, match="line 4"):
        Recording(recorded, settings_to_compare(arguments()))


def test_a_killed_process_loses_no_line(tmp_path: Path) -> None:
    """The file is open all the time, and nothing waits in a buffer."""
    path = tmp_path / "schedule.jsonl"
    write = (
        "import os, signal, sys; from pathlib import Path\n"
        "from slime.rollout.schedule_file import ScheduleFile\n"
        "file = ScheduleFile(Path(sys.argv[1]), None)\n"
        "for number in range(1000): file.append({'line': number})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", write, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [line["line"] for line in read_lines(path)] == list(range(1000))


def test_the_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    original = Path.open
    with monkeypatch.context() as patch:  # not for what pytest and its plug-ins open afterwards
        patch.setattr(
            Path, "open", lambda self, *a, **k: opened.append(self) or original(self, *a, **k)
        )
        patch.setattr("builtins.open", lambda *a, **k: pytest.fail("opened again"))
        schedule = WeightTimeline(
            tmp_path / "schedule.jsonl", settings_to_compare(arguments()), None, 0, None
        )
        for number in range(50):
            schedule("started", [Sample(group_index=number, index=number)], {})
    assert len(opened) == 1


def test_a_full_disk_loses_nothing_once_there_is_room(
    tmp_path: Path, small_disk: Callable[[int], None]
) -> None:
    path = tmp_path / "schedule.jsonl"
    room = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    file = ScheduleFile(path, None)
    file.append({"settings": settings_to_compare(arguments())})
    full = path.stat().st_size + 100  # in the middle of a line
    small_disk(full)
    for line in LINES[:32]:
        file.append(line)
    position = file.position()
    assert path.stat().st_size == full and position is not None and position > full
    assert len(Recording(path, settings_to_compare(arguments())).requests) == 1, (
        "what is there is a beginning without a gap"
    )
    assert any("the schedule" in line for line in take_warnings())
    small_disk(room)
    file.append(LINES[32])
    assert (
        path.read_bytes()[position:]
        == json.dumps(LINES[32], separators=(",", ":")).encode() + b"\n"
    )
    file.close()
    assert sorted(Recording(path, settings_to_compare(arguments())).requests) == [
        (i, 0) for i in range(33)
    ]
    assert take_warnings() == [] and not lost_beside(path).exists()


def lost(path: Path) -> str:
    """That the loss was told, once; the words."""
    (told,) = [line for line in take_warnings() if "are lost" in line]
    assert not path.exists() and lost_beside(path).is_file()
    with pytest.raises(ScheduleError, match=r"schedule\.lost\.jsonl"):
        Recording(path, settings_to_compare(arguments()))
    return told


def test_lines_that_are_lost_are_told_and_the_schedule_is_marked(
    tmp_path: Path, small_disk: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.rollout.schedule_file.MOST_WAITING", 500)
    path = tmp_path / "schedule.jsonl"
    file = ScheduleFile(path, None)
    file.append({"settings": settings_to_compare(arguments())})
    small_disk(path.stat().st_size + 300)
    for line in LINES:
        file.append(line)
    assert file.position() is None
    assert "cannot repeat" in lost(path)
    beginning = Recording(lost_beside(path), settings_to_compare(arguments()))
    assert sorted(beginning.requests) == [(i, 0) for i in range(len(beginning.requests))]
    file.append(LINES[0])  # of no use any more
    file.close()
    assert not path.exists() and take_warnings() == []


def test_lines_that_wait_when_the_run_ends_are_lost(
    tmp_path: Path, small_disk: Callable[[int], None]
) -> None:
    path = tmp_path / "schedule.jsonl"
    file = ScheduleFile(path, None)
    file.append({"settings": settings_to_compare(arguments())})
    small_disk(path.stat().st_size)
    file.append(LINES[0])
    file.close()
    file.close()
    assert "run ended" in lost(path)


def test_a_snapshot_that_speaks_of_more_than_the_file_has(tmp_path: Path) -> None:
    """Killed while lines waited for room, or the machine lost power: a replay from the start would
    have a gap.
    """
    path = tmp_path / "schedule.jsonl"
    file = ScheduleFile(path, None)
    file.append({"settings": settings_to_compare(arguments())})
    resumed = ScheduleFile(path, 5000)
    assert resumed.is_new and resumed.position() == 0
    (told,) = take_warnings()
    assert "5000 bytes" in told and lost_beside(path).is_file()
    other = ScheduleFile(tmp_path / "another run" / "schedule.jsonl", None)
    assert other.position() is None, "a folder that is not there raises nothing"
    assert any("are lost" in line for line in take_warnings())
    assert ScheduleFile(tmp_path / "elsewhere.jsonl", 5000).position() == 0
    (told,) = take_warnings()
    assert "this resume" in told and "whole runs" in told


def test_the_schedule_of_another_run_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    file = ScheduleFile(path, None)
    file.append({"settings": settings_to_compare(arguments())})
    file.append(LINES[0])
    whole, position = path.read_bytes(), file.position()
    assert position is not None and ScheduleFile(path, position - 2).is_new
    (told,) = take_warnings()
    assert "another run" in told and lost_beside(path).read_bytes() == whole


def test_a_recording_says_which_rollouts_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    file = ScheduleFile(path, None)
    file.append({"settings": settings_to_compare(arguments())})
    for rollout, groups in ((3, 2), (4, 2), (5, 1)):
        for group in range(groups):
            file.append({"judged": "accepted", "group": group, "rollout": rollout})
    recording = Recording(path, settings_to_compare(arguments()))
    assert recording.check_covers(3, 5, 2) is None and recording.check_covers(4, 5, 2) is None
    warning = recording.check_covers(3, 6, 2)
    assert warning is not None and "rollout 5" in warning
    with pytest.raises(ScheduleError, match=r"rollout 3.*rollout 0"):
        recording.check_covers(0, 5, 2)


def test_a_replay_does_not_wait_for_requests_that_are_not_in_the_recording(tmp_path: Path) -> None:
    """A generate function that calls the engines itself records none, and a file that begins with a
    resume lacks the first requests of the groups that the snapshot held."""
    path = tmp_path / "schedule.jsonl"
    file = ScheduleFile(path, None)
    file.append({"settings": settings_to_compare(arguments())})
    for line in (
        {"started": 0, "step": 0}, {"judged": "accepted", "group": 0, "rollout": 0},
        {"started": 1, "step": 2}, {"judged": "accepted", "group": 1, "rollout": 1},
        {"judged": "accepted", "group": 2, "rollout": 2},
        {"request": 6, "group": 3, "turn": 1, "spans": [[0, 3]], "tokens": 2, "end": "stop"},
        {"judged": "accepted", "group": 3, "rollout": 3},
    ):  # fmt: skip
        file.append(line)
    recording = Recording(path, settings_to_compare(arguments()))
    assert recording.rollout_step == {0: 0, 1: 2, 2: -1, 3: 3}

    async def replay() -> None:
        schedule = WeightTimeline(
            tmp_path / "again.jsonl", settings_to_compare(arguments()), recording, 0, None
        )
        await schedule.reached(2)
        for rollout in (0, 1, 2):
            await asyncio.wait_for(schedule.may_begin(rollout), 30)

    asyncio.run(replay())


IN_TMPFS = """
import json, os, sys
from pathlib import Path
from slime.config.args import Args
from slime.data.sample import Sample
from slime.observability.samples import KeptTexts, read_samples, sample_files, write_samples
from slime.observability.trace_file import TraceFiles
from slime.observability.files import take_warnings
from slime.rollout.schedule_file import ScheduleFile, read_lines
run = Path(sys.argv[1])
kept = KeptTexts(last=2)
samples = [Sample(prompt="p", response=os.urandom(400).hex()) for _ in range(20)]
write_samples(run, 0, samples, kept=kept)
ballast = (run / "ballast").open("wb", buffering=0)
file = ScheduleFile(run / "schedule.jsonl", None)
file.append({"settings": {}})
try:
    while True:
        ballast.write(b"x" * 4096)
except OSError:
    pass
for number in range(400):
    file.append({"line": number})
for rollout in range(1, 4):
    write_samples(run, rollout, samples, kept=kept)
assert sorted(sample_files(run)) == ["rollout_000000"], sample_files(run)
assert len(os.listdir(run / "samples")) == 1
ballast.truncate(0)
file.append({"line": 400})
for rollout in range(4, 8):
    write_samples(run, rollout, samples, kept=kept)
file.close()
print(json.dumps({
    "lines": [line.get("line") for line in read_lines(run / "schedule.jsonl")],
    "texts": {name: len(read_samples(path)) for name, path in sample_files(run).items()},
    "warnings": take_warnings(),
}))
"""


def test_on_a_file_system_that_is_full(tmp_path: Path) -> None:
    """A tmpfs of 256 KiB in a mount namespace of its own."""
    mounted = (
        f'mount -t tmpfs -o size=256k tmpfs {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    )
    enter = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    ended = subprocess.run(
        [*enter, "bash", "-c", mounted, IN_TMPFS], capture_output=True, text=True, check=False
    )
    if "unshare" in ended.stderr or "mount" in ended.stderr:
        pytest.skip(f"no mount namespace here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["lines"] == [None, *range(401)]
    assert said["texts"] == {"rollout_000006": 20, "rollout_000007": 20}
    assert any("No space" in line for line in said["warnings"])
    assert not any("are lost" in line for line in said["warnings"])
