"""What every example has: its files, scripts whose flags parse, a row in the table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_scripts import CHECKOUT, CLUSTER, EXAMPLES, LAPTOP, dry_run, parse, settings_of

from slime.plugins.agents.sandbox import Sandbox, SandboxUnavailable
from slime.plugins.compat.recorder import command_of, record, starts_training

FOLDERS = sorted(path.parent for path in EXAMPLES.glob("*/run_cpu.sh"))
LOOPS = ("train.py", "train_async.py")
SCRIPTS = sorted(EXAMPLES.glob("*/run_*.sh"))


def name_of(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


def test_every_folder_is_an_example_and_stands_in_the_table() -> None:
    folders = {
        path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    folders.remove("notebook")  # no script: tests/examples/test_notebook.py
    assert folders == {folder.name for folder in FOLDERS}
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert folders == set(re.findall(r"^\| \[([\w-]+)\]\(\1/README\.md\) \|", table, re.MULTILINE))


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_an_example_has_its_files_and_a_test(folder: Path) -> None:
    assert (folder / "run_gpu.sh").is_file()
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert f"bash examples/{folder.name}/run_cpu.sh" in readme and "run_gpu.sh" in readme
    assert (CHECKOUT / "tests" / "examples" / f"test_{folder.name.replace('-', '_')}.py").is_file()


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_a_script_is_a_command(script: Path) -> None:
    assert os.access(script, os.X_OK) and "set -euo pipefail" in script.read_text(encoding="utf-8")
    done = subprocess.run(
        ["bash", "-n", str(script)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all scripts, so that what they share is made once."""
    return tmp_path_factory.mktemp("examples")


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_the_flags_of_a_script_parse(
    script: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = dry_run(script, work)
    assert commands, f"{script} trains nothing: it calls train of common.sh"
    monkeypatch.chdir(CHECKOUT)  # as the scripts do
    for command in commands:
        parse(command, LAPTOP if script.name == "run_cpu.sh" else CLUSTER, monkeypatch)


@pytest.mark.real
@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_translate_runs_a_script_and_sees_what_it_trains(
    script: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        Sandbox()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    work.chmod(0o755)  # the script is run as another user
    for name in ("MODEL", "SGLANG", "DRY_RUN", "SLIME_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings_of(script, work).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(work)
    # One example waits for what it cannot write, until half of this.
    monkeypatch.setattr("slime.plugins.compat.recorder.SECONDS", 12.0)
    recorded = record(script)
    assert (recorded.failure, recorded.remarks) == ("", [])
    trainings = [command_of(words)[1] for words in recorded.commands if starts_training(words)]
    dry = [command for command in dry_run(script, work) if command.script in LOOPS]
    assert [Path(program).name for program, *_ in trainings] == [one.script for one in dry]
    for (_, *flags), command in zip(trainings, dry, strict=True):
        assert len(flags) == len(command.flags)
        # A program of the example that makes data or chooses a port was not run: its command stands
        # for what it would print. The dry run of one example has no teacher of its own yet.
        assert [
            (found, wanted)
            for found, wanted in zip(flags, command.flags, strict=True)
            if found != wanted.replace(sys.executable, "python")
            and "$(python " not in found
            and not found.endswith("/opd_teacher/hf")
        ] == []
