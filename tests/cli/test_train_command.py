"""``slime train``: the loops of the checkout or of the installed package, with the flags as they
are typed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slime.cli.command import CommandError
from slime.cli.main import LOOPS, main, run_loop
from slime.cluster import run


@pytest.fixture(autouse=True)
def _own_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["slime"])


@pytest.mark.parametrize("command", ["train", "train-async"])
def test_the_loop_gets_the_flags_as_they_are_typed(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = []
    words = ["--help-me", "--lr", "-1e-5", "--eval-prompt-data", "name", "path", "--", "x"]
    monkeypatch.setattr(
        "slime.cluster.checks.parse_and_check", lambda asynchronous: (asynchronous, sys.argv)
    )
    monkeypatch.setattr(
        run,
        "load_loop",
        lambda name: type(
            "Loop", (), {"train": staticmethod(lambda args: got.append((name, args)))}
        ),
    )
    assert main([command, *words]) == 0
    file = {"train": "train.py", "train-async": "train_async.py"}[command]
    assert got == [(file, (command == "train-async", [f"slime {command}", *words]))]


def test_help_is_that_of_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--help"])
    said = capsys.readouterr().out
    assert (
        stopped.value.code == 0
        and said.startswith("usage: slime train [flags]")
        and "--rollout-batch-size" in said
    )


def test_the_first_line_of_a_refusal_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train-async", "--lr", "fast"])
    said = capsys.readouterr().err
    assert (
        stopped.value.code == 2
        and said.startswith("slime train-async: ")
        and "--lr: 'fast'" in said
    )


@pytest.mark.parametrize("name", LOOPS.values())
def test_a_checkout_has_the_loops(name: str) -> None:
    assert callable(run.load_loop(name).train)


def test_a_package_without_its_loops_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "__file__", str(tmp_path / "slime" / "cluster" / "run.py"))
    with pytest.raises(CommandError, match=r"train\.py"):
        run_loop("train", [])
