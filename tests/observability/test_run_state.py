"""state.json says what the driver does and how the run ended; logs/driver.log has the lines of the
terminal.
"""

from __future__ import annotations

import io
import json
import os
import socket
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from slime.observability.display import Display
from slime.observability.progress import Progress
from slime.observability.run_dir import RunDir
from slime.observability.run_state import FILE, RunState, StateFile
from slime.plugins.tools.summary import read_state


def display(folder: Path) -> Display:
    return Display(RunDir(folder), Console(file=io.StringIO()))


def phase_of(folder: Path) -> str:
    state = read_state(folder)
    assert state is not None and state.status == "running" and state.pid == os.getpid()
    return state.phase


def test_the_innermost_phase_is_recorded(tmp_path: Path) -> None:
    shown = display(tmp_path)
    assert read_state(tmp_path) is None
    with shown.phase("train"):
        assert phase_of(tmp_path) == "train"
        with shown.phase("save_model"):
            assert phase_of(tmp_path) == "save_model"
        assert phase_of(tmp_path) == "train"
    assert phase_of(tmp_path) == ""


def test_an_error_keeps_its_phase(tmp_path: Path) -> None:
    shown = display(tmp_path)
    with pytest.raises(ValueError) as error, shown.phase("rollout"):
        raise ValueError("no answer")
    assert shown.state is not None
    shown.state.end("failed", error.value)
    state = read_state(tmp_path)
    assert state is not None and (state.status, state.phase) == ("failed", "rollout")
    assert state.error.startswith("Traceback") and "ValueError: no answer" in state.error


def test_an_error_shows_no_password(tmp_path: Path) -> None:
    state = StateFile(tmp_path)
    state.end("failed", ValueError("http://me:s3cret@host/score refused agent --api-key s3cret"))
    text = (tmp_path / FILE).read_text()
    assert "s3cret" not in text and "http://***@host/score refused agent --api-key ***" in text


def test_a_reward_that_is_no_number_does_not_hide_the_state(tmp_path: Path) -> None:
    numbers = {"tokens": 3.0, "reward": float("nan"), "best": float("inf")}
    said = {
        "rollout manager": Progress(phase="generate", done=1, total=4, numbers=numbers),
        "actor rank 0": Progress(),
    }
    StateFile(tmp_path).wait("rollout 0", 0.0, 3600.0, said)
    state = read_state(tmp_path)
    assert state is not None and state.said["rollout manager"]["numbers"] == {"tokens": 3.0}


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    StateFile(tmp_path / "file").enter("train")
    assert FILE in caplog.text


_SOUND = {"status": "running", "pid": 7, "host": "h", "phase": "train", "since": 1.5}


@pytest.mark.parametrize(
    "wrong",
    [
        {"pid": "7"},
        {"pid": 2**40},
        {"status": "x"},
        {"since": None},
        {"said": {"a": {"done": []}}},
        {"error": 5},
    ],
)
def test_values_of_other_types_are_no_state(tmp_path: Path, wrong: dict[str, object]) -> None:
    (tmp_path / FILE).write_text(json.dumps(_SOUND))
    assert read_state(tmp_path) is not None
    (tmp_path / FILE).write_text(json.dumps(_SOUND | wrong))
    assert read_state(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", json.dumps({"status": "running"}), "[]", '{"a":' * 3000])
def test_a_damaged_file_is_no_state(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert read_state(tmp_path) is None


def test_the_lines_of_the_terminal_are_in_the_log(tmp_path: Path) -> None:
    shown = display(tmp_path)
    shown.note("warning: a line")
    shown.note(Table("a table"))
    with shown.phase("train"):
        pass
    lines = (tmp_path / "logs" / "driver.log").read_text().splitlines()
    assert len(lines) == 2 and lines[0].endswith(" warning: a line") and "train" in lines[1]


def test_a_wait_is_recorded_when_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("slime.observability.run_state.time.time", lambda: clock[0])
    file = StateFile(tmp_path)
    file.enter("rollout")
    said: dict[str, Progress] = {
        f"rank {i:02d}": {"phase": "generate", "done": i} for i in range(40)
    }
    for clock[0] in (1001.0, 1001.9):  # most waits are short, and cost no write
        file.wait("rollout 3 to be generated", 1000.0, 60.0, said)
        assert read_state(tmp_path) == RunState(
            "running", os.getpid(), socket.gethostname(), "rollout", 1000.0
        )
    clock[0] = 1002.0
    file.wait("rollout 3 to be generated", 1000.0, 60.0, said)
    state = read_state(tmp_path)
    assert state is not None and (state.waiting, state.deadline, len(state.said)) == (
        "rollout 3 to be generated",
        60.0,
        16,
    )
    clock[0] = 1003.0
    file.wait("rollout 3 to be generated", 1000.0, 60.0, {})
    assert read_state(tmp_path) == state  # written again only after some seconds
    file.end("failed", TimeoutError("too late"))
    assert (
        state := read_state(tmp_path)
    ) is not None and state.waiting == "rollout 3 to be generated"
    other = StateFile(tmp_path)
    other.wait("rollout 3 to be generated", 1000.0, 60.0, said)
    other.wait_over()
    assert (state := read_state(tmp_path)) is not None and (state.waiting, state.said) == ("", {})


def test_a_thread_that_still_waits_does_not_undo_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.observability.run_state.WAIT_SECONDS", 0.0)
    state = StateFile(tmp_path)
    state.end("failed", ValueError("why"))
    state.wait("the engines", 0.0, 60.0, {})
    found = read_state(tmp_path)
    assert (
        found is not None
        and found.status == "failed"
        and "why" in found.error
        and not found.waiting
    )


def test_a_state_of_an_older_release_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(
        '{"status": "failed", "pid": 1, "host": "h", "phase": "train", "since": 1.0, "error": "E"}'
    )
    assert read_state(tmp_path) == RunState("failed", 1, "h", "train", 1.0, "E")
