"""Engines that are killed or hang in every phase of a real run: it goes on, to the same numbers bit for bit."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slime.doctor.facts import read_facts
from slime.doctor.report import diagnose

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SABOTAGE = '''
"""A generate function, and a hook of the trainer, that each strike one engine once."""
import asyncio
import contextlib
import os
from pathlib import Path

import psutil

HERE = Path(__file__).parent


def engines():
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLIME_TEST_RUN") == os.environ["SLIME_TEST_RUN"]:
                line = process.cmdline()
                server = any(f"slime.engines.{kind}.server" in line for kind in ("embedded", "sglang"))
                if server and "slime.engines.guard" not in line:
                    found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: process.pid)


def planned(phase):
    return phase in (HERE / "blow").read_text().split()[:-1]


def strike(phase, url=None):
    """Once per run and phase: the first engine, or that at ``url``."""
    mark = HERE / f"struck-{phase}-{os.environ['SLIME_TEST_RUN']}"
    blow = (HERE / "blow").read_text().split()
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return
    port = (url or "").split(":")[-1]
    victims = [p for p in engines() if not port or p.cmdline()[p.cmdline().index("--port") + 1] == port]
    mark.write_text(str(victims[0].pid))
    for process in [*victims[0].children(recursive=True), victims[0]]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, int(blow[-1]))


async def generate(args, sample, sampling_params):
    from slime.rollout.sglang_rollout import generate

    request = asyncio.ensure_future(generate(args, sample, sampling_params))
    if planned("generate") and sample.group_index >= 5:
        await asyncio.sleep(0.05)
        strike("generate")
    return await request


async def reward(args, sample, **kwargs):
    return sum(c == sample.label for c in sample.response) + 0.01 * (len(sample.response) % 7)


def in_trainer(args, rollout_id, rollout_data):
    """Called in the trainer in each step: arm the next weight update.

    An engine that was struck in the second rollout is back in the third.
    """
    from slime.engines import handle

    if rollout_id < (2 if planned("generate") else 1) or not planned("sync"):
        return
    push, pushed = handle.EngineHandle.push, []

    async def deadly(self, bucket, *more):
        pushed.append(bucket.index)
        if bucket.index == 3:
            strike("sync", self.url)
        await push(self, bucket, *more)

    handle.EngineHandle.push = deadly
'''

QUICK = [
    "--use-fault-tolerance", "--rollout-health-check-interval", 2, "--rollout-health-check-timeout", 20,
    "--num-rollout", 4, "--deterministic", "--update-weight-buffer-size", 20000, "--phase-timeout", 120,
]  # fmt: skip


@pytest.fixture
def sabotage(tmp_path: Path, tiny_model: Path, prompts: Path) -> Callable[..., list[object]]:
    """Flags of a run in which engines are struck: ``sabotage("generate sync", signal.SIGKILL)``, once per phase."""
    file = tmp_path / "sabotage.py"
    file.write_text(SABOTAGE)

    def flags(phases: str, blow: int) -> list[object]:
        (tmp_path / "blow").write_text(f"{phases} {int(blow)}")
        return [
            "--hf-checkpoint", tiny_model, "--prompt-data", prompts, "--apply-chat-template",
            "--custom-rm-path", f"{file}:reward", "--rollout-data-postprocess-path", f"{file}:in_trainer",
            "--custom-generate-function-path", f"{file}:generate", "--lr", "1e-3",
            "--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--rollout-max-response-len", 64,
            "--train-backend", "fsdp", "--rollout-backend", "embedded", "--rollout-shuffle",
        ]  # fmt: skip

    return flags


def trained_groups(folder: Path) -> list[list[int]]:
    """Prompt groups of each step, from the samples that the run wrote."""
    steps = []
    for file in sorted((folder / "samples").glob("rollout*.jsonl")):
        lines = file.read_text().split("\n")  # not splitlines: texts hold other separators
        rows = [json.loads(line) for line in lines if line]
        steps.append(sorted({row["group_index"] for row in rows}))
    return steps


def numbers(rows: list[dict]) -> list[dict]:
    """What training did: rewards, losses, gaps; not the clock, nor what the faults were."""
    leave = ("perf/", "time", "memory/", "rollout/engine_", "rollout/http_", "rollout/router_")
    return [{k: v for k, v in row.items() if not k.startswith(leave) and "cache" not in k} for row in rows]


def struck(runner) -> list[int]:
    """Process ids of the engines that were struck."""
    return [int(file.read_text()) for file in runner.tmp.glob(f"struck-*-{runner.marker}")]


def assert_went_on(runner, result, strikes: int = 1) -> list[dict]:
    assert result.code == 0, result.output
    rows = result.metrics()
    assert [row["rollout/step"] for row in rows] == [0, 1, 2, 3]
    lost = [row["rollout/engine_lost_count"] for row in rows]
    assert sum(lost) == strikes, lost
    assert trained_groups(result.folder) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    pids = struck(runner)
    assert len(pids) == strikes
    assert runner.wait_gone() == []
    assert not [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
    return rows


@pytest.mark.slow
def test_the_only_engine_is_killed_while_it_generates(runner, sabotage) -> None:
    """It is started again, gets the trainer's weights, and the requests wait for it."""
    result = runner.run(*sabotage("generate", signal.SIGKILL), *QUICK)
    rows = assert_went_on(runner, result)
    assert sum(row["rollout/engine_restart_count"] for row in rows) == 1
    assert sum(row["rollout/http_retry_count"] for row in rows) > 0
    log = (result.folder / "logs" / "rollout-manager.log").read_text()
    for words in ("is lost: its process", "is up again", "and waits for weights", "serves"):
        assert words in log, log
    assert "started again, with the current weights" in result.output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phases", "blow", "engines", "more"),
    [
        *(("generate sync", blow, n, []) for blow in ("SIGKILL", "SIGSTOP") for n in (1, 2)),
        *(("generate", "SIGKILL", n, ["--colocate"]) for n in (1, 2)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_struck_run_equals_an_undisturbed_one(runner, sabotage, undisturbed, phases, blow, engines, more) -> None:
    more = [*QUICK, "--rollout-num-gpus", engines, "--distributed-timeout-minutes", 1, *more]
    if "rows" not in undisturbed:
        whole = runner.run(*sabotage("never", 0), *QUICK, name="whole")
        assert whole.code == 0, whole.output
        undisturbed["rows"] = numbers(whole.metrics())
    result = runner.run(*sabotage(phases, signal.Signals[blow]), *more, timeout=400)
    rows = assert_went_on(runner, result, len(phases.split()))
    assert numbers(rows) == undisturbed["rows"]


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("phase", "blow"), [("generate", signal.SIGKILL), ("sync", signal.SIGSTOP)], ids=["generate", "sync"]
)
def test_real_sglang_is_struck_and_comes_back(runner, sabotage, phase, blow) -> None:
    """The only server, on the CPU: killed over its requests, or stopped in the middle of a weight update."""
    flags = [*sabotage(phase, blow), *QUICK, "--distributed-timeout-minutes", 1]
    flags[flags.index("--deterministic")] = "--no-deterministic"
    flags[flags.index("embedded")] = "sglang"
    flags += ["--sglang-device", "cpu", "--sglang-max-total-tokens", 8192, "--phase-timeout", 400]
    rows = assert_went_on(runner, runner.run(*flags, timeout=800))
    assert all(row["perf/audit_logprob_diff"] < 1e-3 for row in rows)
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-3 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_idle_engine_is_lost_while_the_trainer_works(runner, sabotage, blow) -> None:
    """From outside, at a random moment; asynchronous, so that the trainer is often busy when it is needed."""
    flags = [*sabotage("never", 0), *QUICK, "--rollout-num-gpus", 2, "--num-rollout", 8]
    process = runner.start("--run-name", "run", *flags, "--async-buffer-size", 2, script="train_async.py")
    metrics = runner.tmp / "outputs" / "run" / "metrics.jsonl"
    until = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
        time.sleep(0.05)
    victim = next(p for p in runner.alive() if "slime.engines.embedded.server" in p.cmdline())
    os.kill(victim.pid, blow)
    result = runner.finish(process, "run", 200)
    assert result.code == 0, result.output
    assert [row["rollout/step"] for row in result.metrics()] == list(range(8))
    assert runner.wait_gone() == []


@pytest.mark.slow
def test_without_fault_tolerance_the_run_ends_at_once_and_says_why(runner, sabotage) -> None:
    flags = [flag for flag in QUICK if flag != "--use-fault-tolerance"]
    result = runner.run(*sabotage("generate", signal.SIGKILL), *flags, "--rollout-num-gpus", 2)
    assert result.code not in (0, None)
    for words in ("was lost: its process", "ended", "--use-fault-tolerance goes on without it"):
        assert words in result.output, result.output
    assert runner.wait_gone() == []
    found = diagnose(read_facts(result.folder))
    assert found[0].kind == "process_lost" and "was lost: its process" in found[0].evidence[0]


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_router_is_started_again(runner, sabotage, blow) -> None:
    flags = [*sabotage("never", 0), *QUICK, "--rollout-num-gpus", 2, "--num-rollout", 6]
    process = runner.start("--run-name", "run", *flags)
    metrics = runner.tmp / "outputs" / "run" / "metrics.jsonl"
    until = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") >= 1):
        assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
        time.sleep(0.05)
    router = next(p for p in runner.alive() if p.name().startswith("sglang::router"))
    os.kill(router.pid, blow)
    result = runner.finish(process, "run", 200)
    assert result.code == 0, result.output
    rows = result.metrics()
    assert [row["rollout/step"] for row in rows] == list(range(6))
    assert sum(row["rollout/router_restart_count"] for row in rows) == 1
    assert runner.wait_gone() == []
