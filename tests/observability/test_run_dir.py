"""The folder of a run: what is in it, who moves aside, what is never written there."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from make_args import make_args

from slime.observability.run_dir import RunDir, RunDirError
from slime.plugins.tools.summary import MOST_NAMED, no_run, runs_in


@dataclass
class Arguments:
    output_dir: str
    run_name: str
    load: str | None = None
    lr: float = 1e-5
    wandb_key: str | None = "secret"
    eval_prompt_data: list[str] = field(default_factory=lambda: ["a", "b"])


def test_folders_config_and_link(tmp_path: Path) -> None:
    args = Arguments(str(tmp_path), "first")
    args.max_turns = 5  # type: ignore[attr-defined]  # hooks set extra attributes
    run = RunDir.create(args)
    assert all(folder.is_dir() for folder in (run.tensorboard, run.samples, run.traces, run.logs))
    config = yaml.safe_load(run.config.read_text())
    assert (
        config["lr"] == 1e-5
        and config["max_turns"] == 5
        and config["eval_prompt_data"] == ["a", "b"]
    )
    assert "secret" not in run.config.read_text()
    assert (tmp_path / "latest").resolve() == run.path
    RunDir.create(Arguments(str(tmp_path), "second"))
    assert (tmp_path / "latest").resolve().name == "second"


def test_an_earlier_run_of_the_name_moves_aside_unless_it_is_resumed(tmp_path: Path) -> None:
    for text in ("one", "two", "three"):
        RunDir.create(Arguments(str(tmp_path), "run")).metrics.write_text(text)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "three"
    assert (tmp_path / "run.1" / "metrics.jsonl").read_text() == "one"
    assert (tmp_path / "run.2" / "metrics.jsonl").read_text() == "two"
    run = RunDir.create(Arguments(str(tmp_path), "run"), resume=True)
    assert run.metrics.read_text() == "three"
    run = RunDir.create(Arguments(str(tmp_path), "run", load=str(run.checkpoints)))
    assert run.metrics.read_text() == "three", "the folder that --load reads from must not move"


def test_a_real_folder_called_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    RunDir.create(Arguments(str(tmp_path), "x"))
    assert not (tmp_path / "latest").is_symlink()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="--output-dir"):
        RunDir.create(make_args().with_values(output_dir=str(tmp_path / "file"), run_name="x"))


def test_the_runs_of_a_folder(tmp_path: Path) -> None:
    run = RunDir.create(Arguments(str(tmp_path), "first")).path
    (tmp_path / "data").mkdir()
    assert runs_in(tmp_path) == [run] == runs_in(run) == runs_in(tmp_path / "latest")
    assert (
        runs_in(tmp_path / "data")
        == runs_in(tmp_path / "none")
        == runs_in(run / "config.yaml")
        == []
    )


def test_a_path_that_is_no_run_is_explained_with_the_runs_near_it(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    assert no_run(outputs).startswith(f"{outputs} does not") and "--output-dir" in no_run(outputs)
    names = [f"run{number}" for number in range(MOST_NAMED + 2)]
    for number, name in enumerate(names):
        config = RunDir.create(Arguments(str(outputs), name)).config
        os.utime(config, (number, number))
    newest = ", ".join(str(outputs / name) for name in names[:1:-1]) + " and 2 more"
    assert no_run(outputs).startswith(f"{outputs} is not") and no_run(outputs).endswith(
        f"config.yaml; runs near it: {newest}"
    )
    assert no_run(outputs / "rnu7") == f"{outputs / 'rnu7'} does not exist; runs near it: {newest}"
    inside = outputs / "run3" / "config.yaml"
    assert (
        no_run(inside)
        == f"{inside} is a file, not the folder of a run; runs near it: {outputs / 'run3'}"
    )
