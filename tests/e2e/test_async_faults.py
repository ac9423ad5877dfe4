"""Asynchronous runs that are killed, resumed and replayed: they end, lose no group and use none
twice.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from run_processes import of_role

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
FULLY = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
SCRIPT = "train_async.py"
SLOW_REWARD = """
import asyncio
import pathlib
import random

HERE = pathlib.Path(__file__).parent


async def reward(args, sample, **kwargs):
    await asyncio.sleep(random.Random(sample.index).random() * 0.05)  # groups end in another order than they began
    return sum(c == sample.label for c in sample.response) + 0.01 * (len(sample.response) % 7)


def slow_step(args, rollout_id, rollout_data):
    import time

    time.sleep(0.1)
"""


@pytest.fixture
def asynchronous(tmp_path: Path, tiny_model: Path, prompts: Path) -> list[object]:
    """Eight short steps, fully asynchronous, with updates under way and a filter."""
    file = tmp_path / "slow.py"
    file.write_text(SLOW_REWARD)
    return [
        "--hf-checkpoint", tiny_model, "--prompt-data", prompts, "--apply-chat-template", "--rollout-shuffle",
        "--custom-rm-path", f"{file}:reward", "--rollout-data-postprocess-path", f"{file}:slow_step",
        "--lr", "1e-3", "--rollout-batch-size", 4, "--n-samples-per-prompt", 2, "--rollout-max-response-len", 200,
        "--train-backend", "fsdp", "--rollout-backend", "embedded", "--num-rollout", 8, "--phase-timeout", 120,
        "--async-buffer-size", 2, "--rollout-function-path", FULLY, "--dynamic-sampling-filter-path",
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    ]  # fmt: skip


def steps_logged(folder: Path) -> int:
    return (
        (folder / "metrics.jsonl").read_text().count("rollout/step")
        if (folder / "metrics.jsonl").exists()
        else 0
    )


def account(folder: Path) -> dict:
    """What ``slime ledger`` says; the account must close."""
    command = [sys.executable, "-m", "slime.cli.main", "ledger", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def assert_accounted(result, steps: int = 8, batch: int = 4) -> dict:
    """The run ended; every group is in one place, and the rows of the file are the groups that
    steps trained.
    """
    assert result.code == 0, result.output
    assert [row["rollout/step"] for row in result.metrics()] == list(range(steps))
    said = account(result.folder)
    assert said["counts"]["trained"] == steps * batch
    lines = [json.loads(line) for line in (result.folder / "ledger.jsonl").read_text().splitlines()]
    trained = [(row["rollout"], row["group"]) for row in lines if row.get("state") == "trained"]
    assert len({group for _, group in trained}) == len(trained) == steps * batch
    for step in range(steps):
        rows = (result.folder / "samples" / f"rollout_{step:06d}.jsonl").read_text().split("\n")
        groups = {json.loads(row)["group_index"] for row in rows if row}
        assert groups == {group for rollout, group in trained if rollout == step}
    return said


def numbers(rows: list[dict]) -> list[dict]:
    """What training did: rewards, losses, gaps; not the clock, nor how many groups stood about at
    that moment.
    """
    leave = (
        "perf/",
        "time",
        "memory/",
        "rollout/engine_",
        "rollout/http_",
        "rollout/router_",
        "rollout/buffered",
    )
    gone = ("cache", "under_way")
    return [
        {k: v for k, v in row.items() if not k.startswith(leave) and not any(w in k for w in gone)}
        for row in rows
    ]


def test_a_killed_one_step_run_resumes_bit_for_bit(runner, asynchronous) -> None:
    """The rollout that was generated ahead is in the snapshot: it is trained, not made again."""
    one_step = [*asynchronous, "--async-buffer-size", 1, "--save-interval", 1, "--num-rollout", 5]
    one_step += ["--rollout-max-response-len", 80]
    one_step += ["--rollout-function-path", "slime.rollout.sglang_rollout.generate_rollout"]
    whole = runner.inline(*one_step, "--save", runner.tmp / "whole", name="whole", script=SCRIPT)
    assert_accounted(whole, 5)
    saved = runner.tmp / "saved"
    process = runner.start(
        "--run-name", "parts", "--inline", *one_step, "--save", saved, script=SCRIPT
    )
    latest = saved / "latest_checkpointed_iteration.txt"
    runner.wait_until(process, lambda: latest.exists() and latest.read_text().strip() == "1")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert runner.wait_gone(60) == []
    resumed = runner.inline(
        *one_step, "--save", saved, "--load", saved, name="parts", script=SCRIPT
    )
    assert_accounted(resumed, 5)
    assert numbers(resumed.metrics()) == numbers(whole.metrics())


@pytest.mark.long
def test_a_killed_fully_asynchronous_run_goes_on_and_its_replay_repeats_it(
    runner, asynchronous, long_answers
) -> None:
    """In the mode ``retract``; the other ones are below."""
    saved = runner.tmp / "saved"
    # Enough steps after the kill that an update comes while answers are under way.
    asynchronous += ["--custom-generate-function-path", long_answers, "--num-rollout", 12]
    flags = [*asynchronous, "--save", saved, "--save-interval", 2]
    process = runner.start("--run-name", "parts", *flags, script=SCRIPT)
    runner.wait_until(process, lambda: steps_logged(runner.tmp / "outputs" / "parts") >= 4)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert runner.wait_gone(60) == []
    wrong = runner.inline(*flags, "--load", saved, "--rollout-seed", 7, name="parts", script=SCRIPT)
    assert wrong.code != 0 and "rollout_seed: 42 -> 7" in wrong.output
    resumed = runner.run(*flags, "--load", saved, name="parts", script=SCRIPT)
    said = assert_accounted(resumed, 12)
    assert [undone["attempt"] for undone in said["rolled_back"]] in ([1], [1, 2])
    assert_divided(resumed.folder, kv_kept=False)
    replay = ["--replay-schedule", resumed.folder / "schedule.jsonl"]
    repeated = runner.inline(*asynchronous, *replay, name="replay", script=SCRIPT)
    assert_accounted(repeated, 12)
    assert numbers(repeated.metrics()) == numbers(resumed.metrics())


def assert_divided(folder: Path, kv_kept: bool) -> None:
    """Updates came while answers were under way."""
    lines = [json.loads(line) for line in (folder / "schedule.jsonl").read_text().splitlines()]
    divided = [
        line
        for line in lines
        if "request" in line and (len(line["spans"]) > 1 or line["end"] == "abort")
    ]
    assert divided, "no update came while an answer was under way"
    assert all(line["kv_kept"] == kv_kept for line in divided if len(line["spans"]) > 1)


@pytest.mark.parametrize("mode", ["in_place", pytest.param("abort", marks=pytest.mark.long)])
def test_a_replay_has_the_same_losses(runner, asynchronous, long_answers, mode) -> None:
    flags = [
        *asynchronous,
        "--update-weight-pause-mode",
        mode,
        "--num-rollout",
        6,
        "--update-weights-interval",
        2,
    ]
    flags += ["--custom-generate-function-path", long_answers, "--rollout-max-response-len", 250]
    first = runner.inline(*flags, name="first", script=SCRIPT)
    assert_accounted(first, 6)
    assert_divided(first.folder, kv_kept=mode == "in_place")
    second = runner.inline(
        *flags, "--replay-schedule", first.folder / "schedule.jsonl", name="second", script=SCRIPT
    )
    assert_accounted(second, 6)
    assert numbers(second.metrics()) == numbers(first.metrics())


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
BLOWS = {
    "actors": (("rank", KILL), ("engine", KILL), ("manager", STOP), ("manager", KILL)),
    "processes": (("raylet", KILL), ("rank", STOP), ("driver", KILL)),
    "GCS": (("GCS", KILL),),
}
APART = 5
"""So many steps lie between blows: more than an asynchronous run can go on for without one of its
processes.
"""


def strike(runner, process, victim: str, number: int, steps: int) -> psutil.Process:
    """Send a signal to one process of a run that has made so many steps."""
    folder = runner.tmp / "outputs" / "run"
    runner.wait_until(process, lambda: steps_logged(folder) >= steps)
    struck = of_role(runner.marker, victim)[0]
    os.kill(struck.pid, number)
    return struck


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("blows", BLOWS)
def test_whatever_is_struck_the_run_ends_and_the_ledger_closes(runner, asynchronous, blows) -> None:
    """One process after the other. A frozen one is noticed long before the time limit of the
    phase.
    """
    # Ray itself ends the driver some time after the head of the cluster is gone.
    steps = 60 if blows == "GCS" else APART * (len(BLOWS[blows]) + 1)
    flags = [
        *asynchronous,
        "--use-fault-tolerance",
        "--rollout-health-check-interval",
        2,
        "--save-interval",
        1,
    ]
    flags += ["--num-rollout", steps, "--status-timeout", 20, "--phase-timeout", 1000]
    process = runner.start("--run-name", "run", *flags, script=SCRIPT)
    struck = [
        strike(runner, process, victim, number, 3 + APART * count)
        for count, (victim, number) in enumerate(BLOWS[blows])
    ]
    result = runner.finish(process, "run", 500)
    said = assert_accounted(result, steps)
    restarts = [victim for victim, _ in BLOWS[blows] if victim != "engine"]
    # A lost rank is replaced if nothing else is lost with it, otherwise the whole run is restarted.
    returns = result.output.count("going on from ") + result.output.count("the engines stayed")
    assert len(said["rolled_back"]) == len(restarts) == returns
    assert "resumed from" in result.output
    if ("engine", KILL) in BLOWS[blows]:
        assert sum(row["rollout/engine_lost_count"] for row in result.metrics()) == 1
    frozen = sum(number == STOP for _, number in BLOWS[blows])
    assert result.output.count("did not answer for 20 s (--status-timeout)") >= frozen
    assert runner.wait_gone() == []
    for each in struck:
        assert (
            not psutil.pid_exists(each.pid)
            or psutil.Process(each.pid).status() == psutil.STATUS_ZOMBIE
        )
