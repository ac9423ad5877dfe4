"""A package of a stranger is installed and brings a part of each kind, with one registration for
each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "tests" / "plugins" / "foreign_package"

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables with which Python finds the package as pip has installed it."""
    import shutil

    source = shutil.copytree(PACKAGE, tmp_path_factory.mktemp("source") / "package")
    target = tmp_path_factory.mktemp("site")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    done = subprocess.run(
        [*pip, "--target", str(target), str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {"PYTHONPATH": f"{target}{os.pathsep}{CHECKOUT}"}


def slime(words: list[object], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slime.cli.main", *map(str, words)]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=120
    )


def test_its_command_and_its_flag_are_there(installed: dict[str, str]) -> None:
    assert slime(["haiku", "--about", "pond"], installed).stdout == "an old silent pond\n"
    help_text = slime(["train", "--help"], installed).stdout
    assert (
        "--baseline-share" in help_text
        and "scripted" in help_text
        and "counted" in help_text
        and "note" in help_text
    )
    assert "haiku" not in slime(["--help"], {}).stdout


def test_its_wrong_values_are_told_like_those_of_slime(
    installed: dict[str, str], runner, flags
) -> None:
    wrong = runner.run(
        *flags, "--inline", "--baseline-share", 2, "--rm-type", "vowel", env=installed
    )
    assert (
        wrong.code == 2
        and "--baseline-share 2: must be from 0" in wrong.output
        and "vowels" in wrong.output
    )


def test_a_run_uses_its_estimator_reward_engine_backend_transport_and_tracker(
    installed: dict[str, str], runner, flags
) -> None:
    own = [*flags]
    at = own.index("--custom-rm-path")
    own[at : at + 2] = ["--rm-type", "vowels"]
    parts = (
        "--advantage-estimator",
        "share",
        "--baseline-share",
        0.5,
        "--rollout-backend",
        "scripted",
        "--train-backend",
        "counted",
    )
    parts += ("--update-weight-transport", "note", "--no-audit-weights", "--tracker", "lines")
    run = runner.run(*own, *parts, "--inline", "--num-rollout", 2, env=installed)
    assert run.code == 0, run.output
    log = "".join(file.read_text() for file in (run.folder / "logs").rglob("*") if file.is_file())
    assert "counted step" in log + run.output, "the backend is that of the package"
    assert "tensors of" in log, "the engine has read the notes of the transport"
    assert "rollout/step 1" in (run.folder / "lines.txt").read_text()
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["rollout/raw_reward"] for row in rows if "rollout/raw_reward" in row]
    assert len(rewards) == 2 and all(0 < reward < 1 for reward in rewards)


def test_a_run_takes_the_tasks_of_its_environment(installed: dict[str, str], runner, flags) -> None:
    own = [*flags]
    for flag in ("--custom-rm-path", "--prompt-data"):
        at = own.index(flag)
        del own[at : at + 2]
    run = runner.run(
        *own, "--environment", "counting:3", "--inline", "--num-rollout", 1, env=installed
    )
    assert run.code == 0, run.output
    samples = "".join(file.read_text() for file in (run.folder / "samples").glob("*.jsonl"))
    assert "Count to" in samples
