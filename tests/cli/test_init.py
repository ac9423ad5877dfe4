"""``slime init``: complete folders that train as they are."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.cli.command import CommandError
from slime.cli.main import main
from slime.config.hooks import load_function
from slime.data.sample import Sample
from slime.plugins.tools.commands.make_data import STARTERS, TASKS, init

CHECKOUT = Path(__file__).resolve().parents[2]


MORE = {"distill": {"lessons.jsonl"}, "mixture": {"mixture.yaml", "sums.jsonl"}}
"""The files of a task beside those of all."""


@pytest.mark.parametrize("task", TASKS)
def test_a_folder_is_complete_and_its_sets_are_disjoint(task: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert main(["init", str(folder), "--task", task]) == 0
    files = {"reward.py", "data.jsonl", "heldout.jsonl", "run.sh"} | MORE.get(task, set())
    assert {path.name for path in folder.iterdir()} == files
    train, held_out = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("data.jsonl", "heldout.jsonl")
    )
    assert len(train) >= 64 and len(held_out) == 16
    assert not {str(row["prompt"]) for row in train} & {str(row["prompt"]) for row in held_out}
    for row in train + held_out:
        a, b = (
            int(word) for word in row["prompt"][-1]["content"].rstrip("?").split() if word.isdigit()
        )
        assert row["label"] == str(a * b)
    subprocess.run(["bash", "-n", str(folder / "run.sh")], check=True, timeout=20)


def last_number(text: str) -> str:
    return re.findall(r"\d+", text)[-1]


def test_pairs_lessons_and_sums() -> None:
    pairs = [json.loads(line) for line in TASKS["preference"]()["data.jsonl"].splitlines()]
    for row in pairs:
        assert last_number(row["chosen"]) == row["label"] != last_number(row["rejected"])
    for line in TASKS["distill"]()["lessons.jsonl"].splitlines():
        *prompt, answer = json.loads(line)["messages"]
        (row,) = (row for row in pairs if row["prompt"] == prompt)
        assert last_number(answer["content"]) == row["label"]
    for line in TASKS["mixture"]()["sums.jsonl"].splitlines():
        row = json.loads(line)
        assert row["label"] == str(row["metadata"]["a"] + row["metadata"]["b"])
        assert " plus " in row["prompt"][-1]["content"]


def test_every_starter_has_its_task() -> None:
    assert {
        path.name.replace("_", "-") for path in STARTERS.iterdir() if (path / "run.sh").is_file()
    } == set(TASKS)


def test_a_folder_with_files_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").touch()
    assert main(["init", str(tmp_path)]) == 1
    assert "not empty" in capsys.readouterr().err
    with pytest.raises(CommandError):
        init(tmp_path / "thesis.tex", "agent")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("task", TASKS)
def test_the_script_passes_every_check(
    task: str,
    tmp_path: Path,
    smollm2: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    init(tmp_path / "mine", task)
    samples = {"preference": 16, "distill": 32}.get(task, 64)
    # The command of the script runs in this process, which has imported torch and transformers.
    command = run(tmp_path, smollm2, "--dry-run", slime="printf '%s\\0'").split("\0")[:-1]
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setattr(sys, "argv", sys.argv)  # the command sets it
    with pytest.raises(SystemExit) as end:
        main(command)
    said = capsys.readouterr().out
    assert not end.value.code, said
    assert f"= {samples} samples" in said and "12 rollouts" in said
    assert "<|im_start|>assistant" in said
    if task == "agent":
        assert "reward.py:run" in said
    elif task not in ("preference", "mixture"):
        assert f"the same for the first 8 prompts: {', '.join(['1.0'] * 8)}" in said


@pytest.mark.parametrize("task", TASKS)
def test_a_relative_model_is_one_of_where_the_command_was_typed(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(tmp_path / "mine", task)
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    words = run(tmp_path, Path("weights"), slime="printf '%s\\0'").split("\0")
    assert "weights" not in words and str(tmp_path / "weights") in words


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_it_trains_as_it_is(task: str, tmp_path: Path, smollm2: Path) -> None:
    init(tmp_path / "mine", task)
    assert "hooks satisfy their contract" in run(tmp_path, smollm2, "check-hooks")
    held_out = tmp_path / "mine" / "heldout.jsonl"
    # the rest takes a minute
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:2]))
    small = ["--num-rollout", "1", "--rollout-batch-size", "2", "--skip-eval-before-train"]
    said = run(tmp_path, smollm2, *small)
    assert "step 1/1" in said
    metrics = tmp_path / "mine" / "outputs" / "starter" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    learned_from = "train/loss" if task == "preference" else "rollout/raw_reward"
    assert sum(row.get(learned_from) or 0.0 for row in rows) > 0, "there is something to learn from"


def run(
    tmp_path: Path,
    model: Path,
    *words: str,
    slime: str = f"exec {sys.executable} -m slime.cli.main",
) -> str:
    """The output of run.sh, with this checkout, or another command, as the ``slime`` on the
    path.
    """
    command = tmp_path / "bin" / "slime"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\n{slime} "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(CHECKOUT), "MODEL": str(model)}
    if "--dry-run" not in words:
        environment["TEACHER"] = str(model)  # its own takes a minute
    script = [shutil.which("bash") or "bash", str(tmp_path / "mine" / "run.sh"), *words]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("31 * 14", "434"),
        (" 2 - 3*4 ", "-10"),
        ("2**9", "error: only whole numbers with + - *"),
        ("__import__('os')", "error: only whole numbers with + - *"),
        ("1.5 * 2", "error: only whole numbers with + - *"),
        ("(" * 30, "error: only whole numbers with + - *"),
        ("", "error: only whole numbers with + - *"),
        ("True * 2", "error: only whole numbers with + - *"),
    ],
)
def test_the_calculator_reads_numbers_only(expression: str, said: str) -> None:
    assert load_function(f"{STARTERS}/tool_use/reward.py:calculate")(expression) == said


@pytest.mark.parametrize(
    ("task", "response", "reward"),
    [
        ("single_turn", "It is 12.", 1.0),
        ("single_turn", "13", 0.1),
        ("single_turn", "120 or so", 0.0),
        ("single_turn", "no idea", 0.0),
        ("tool_use", "<calc>3 * 4</calc>|12", 1.0),
        ("tool_use", "<calc>3 * 4</calc>|", 0.2),
        ("tool_use", "<calc>3 * 4</calc>|<calc>12</calc>", 0.2),
        ("tool_use", "12", 1.0),
        ("tool_use", "I would say 13", 0.0),
    ],
)
async def test_the_rewards(task: str, response: str, reward: float) -> None:
    sample = Sample(prompt="What is 3 * 4?", label="12")
    sample.response = response
    sample.metadata["model_turns"] = [{"text": turn} for turn in response.split("|")]
    assert (
        await load_function(f"{STARTERS}/{task}/reward.py:reward")(SimpleNamespace(), sample)
        == reward
    )


def test_the_next_command_is_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "my task")]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ").split(", then ")[1]
    assert shlex.split(command) == ["bash", str(tmp_path / "my task" / "run.sh")]
