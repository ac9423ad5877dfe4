"""state.json says what the driver does and how the run ended; logs/driver.log has the lines of the terminal."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from slime.observability.display import Display
from slime.observability.run_dir import RunDir
from slime.observability.run_state import FILE, StateFile, read_state


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


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    StateFile(tmp_path / "file").enter("train")
    assert FILE in caplog.text


@pytest.mark.parametrize("text", ["", "{", json.dumps({"status": "running"}), "[]"])
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
