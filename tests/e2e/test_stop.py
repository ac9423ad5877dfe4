"""SIGTERM to all processes of a run's process group, as ``timeout``, ``kill -- -PGID`` and batch
systems send it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.plugins.tools.summary import read_state

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

HOOKS = '''
"""A generate function and a hook of the trainer that take long enough for a signal to arrive in them."""
import asyncio
import time
from pathlib import Path

HERE = Path(__file__).parent


async def generate(args, sample, sampling_params):
    from slime.rollout.generate import generate as ask

    if sample.group_index >= 8:  # a step was trained before
        (HERE / "in-generate").touch()
        await asyncio.sleep(2)
    return await ask(args, sample, sampling_params)


def in_trainer(args, rollout_id, rollout_data):
    if rollout_id >= 1:
        (HERE / "in-train").touch()
        time.sleep(2)
'''


@pytest.fixture
def begin(runner, flags, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a run whose rollouts and training steps each announce themselves and take two
    seconds.
    """
    hooks = tmp_path / "hooks.py"
    hooks.write_text(HOOKS)
    hooked = ["--custom-generate-function-path", f"{hooks}:generate"]
    hooked += ["--rollout-data-postprocess-path", f"{hooks}:in_trainer"]

    def start(script: str = "train.py", ranks: int = 1, *more: object) -> subprocess.Popen[str]:
        words = [
            *flags,
            *hooked,
            "--actor-num-gpus-per-node",
            ranks,
            "--save",
            tmp_path / "saved",
            *more,
        ]
        return runner.start("--run-name", "run", *words, "--num-rollout", 200, script=script)

    return start


def signal_when(runner, process: subprocess.Popen[str], reached: Callable[[], object]) -> None:
    """Send SIGTERM to the process group of a run as soon as it has come so far."""
    runner.wait_until(process, reached, pause=0.002)
    os.killpg(process.pid, signal.SIGTERM)


def arrives(phase: str, folder: Path) -> Callable[[], object]:
    if phase == "save":
        return lambda: list((folder / "saved").glob(".iter_0000001.tmp-*"))
    return (folder / f"in-{phase}").exists


def assert_saved_in_order(runner, process: subprocess.Popen[str]) -> None:
    """The step in progress is in a published snapshot, and no process of the run is left."""
    result = runner.finish(process, "run")
    assert result.code == 143, result.output
    assert "Traceback" not in result.output
    saved = runner.tmp / "saved"
    published = int((saved / "latest_checkpointed_iteration.txt").read_text())
    logged = max((row["rollout/step"] for row in result.metrics()), default=-1)
    assert published - logged in (0, 1)  # 1: it was being trained
    assert sorted(saved.glob(".iter_*")) == []
    state = read_state(result.folder)
    assert state is not None and state.status == "stopped"
    assert runner.wait_gone() == []


FURTHER = pytest.mark.long
CELLS = [
    ("train_async.py", 2, "generate"),
    *(
        pytest.param(*cell, marks=FURTHER)
        for cell in (
            ("train.py", 1, "generate"),
            ("train.py", 2, "train"),
            ("train.py", 1, "save"),
            ("train_async.py", 1, "train"),
            ("train_async.py", 2, "save"),
        )
    ),
]
"""Each pair of a loop, a number of ranks and a phase."""


@pytest.mark.parametrize(("script", "ranks", "phase"), CELLS)
def test_a_signal_to_the_process_group_saves_and_ends_in_order(
    runner, begin, tmp_path, script, ranks, phase
) -> None:
    more = ["--save-interval", 1 if phase == "save" else 150]
    process = begin(script, ranks, *more)
    signal_when(runner, process, arrives(phase, tmp_path))
    assert_saved_in_order(runner, process)


def test_the_second_signal_to_the_process_group_ends_the_run_at_once(
    runner, begin, tmp_path
) -> None:
    """With a supervisor, which gets both signals as well and forwards them."""
    process = begin("train.py", 1, "--max-restarts", 1)
    signal_when(runner, process, arrives("train", tmp_path))
    while "press again to kill" not in process.stdout.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    result = runner.finish(process, "run", timeout=60)
    assert result.code == 143, result.output
    assert "saved rollout" not in result.output
    assert runner.wait_gone() == []


@pytest.mark.parametrize(
    "role",
    [
        *(pytest.param(role, marks=FURTHER) for role in ("gcs_server", "raylet")),
        "ray::RolloutManager",
    ],
)
def test_a_signal_to_the_process_group_during_the_start_ends_the_run(runner, begin, role) -> None:
    process = begin("train.py", 1)
    signal_when(
        runner, process, lambda: [one for one in runner.alive() if one.name().startswith(role[:15])]
    )
    result = runner.finish(process, "run")
    assert result.code == 143, result.output
    assert "Traceback" not in result.output
    assert runner.wait_gone() == []
