"""Engines that are killed or hang in every phase of a real run: it goes on, to the same numbers bit
for bit.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from run_processes import of_role

from slime.plugins.tools.doctor import diagnose
from slime.plugins.tools.doctor.facts import read_facts

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SABOTAGE = '''
"""A generate function, and a hook of the trainer, that strike engines."""
import asyncio
import contextlib
import json
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
                server = "slime.plugins.embedded.server" in line or "slime.plugins.sglang.server" in line
                if server and "slime.engines.guard" not in line:
                    found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: process.pid)


def plan():
    """[phase, rollout, signal] of each blow."""
    return json.loads((HERE / "plan.json").read_text())


def strike(phase, rollout, number, url=None):
    """Once per run: the first engine, or that at ``url``."""
    mark = HERE / f"struck-{phase}-{rollout}-{os.environ['SLIME_TEST_RUN']}"
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return
    port = (url or "").split(":")[-1]
    victims = [p for p in engines() if not port or p.cmdline()[p.cmdline().index("--port") + 1] == port]
    mark.write_text(str(victims[0].pid))
    for process in [*victims[0].children(recursive=True), victims[0]]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def generate(args, sample, sampling_params):
    from slime.rollout.sglang_rollout import generate

    request = asyncio.ensure_future(generate(args, sample, sampling_params))
    for phase, rollout, number in plan():
        if phase == "generate" and sample.group_index > 4 * rollout:
            await asyncio.sleep(0.05)
            strike(phase, rollout, number)
    return await request


async def reward(args, sample, **kwargs):
    return sum(c == sample.label for c in sample.response) + 0.01 * (len(sample.response) % 7)


def in_trainer(args, rollout_id, rollout_data):
    """Called in the trainer in each step: arm the weight update after it."""
    for phase, rollout, number in plan():
        if phase == "sync" and rollout == rollout_id:
            arm(rollout, number)


def arm(rollout, number):
    from slime.engines import handle

    push = handle.EngineHandle.push

    async def deadly(self, bucket, *more):
        if bucket.index == 3:
            strike("sync", rollout, number, self.url)
        await push(self, bucket, *more)

    handle.EngineHandle.push = deadly
'''

QUICK = [
    "--use-fault-tolerance", "--rollout-health-check-interval", 2, "--rollout-health-check-timeout", 20,
    "--deterministic", "--update-weight-buffer-size", 20000, "--phase-timeout", 120,
]  # fmt: skip


Blow = tuple[str, int, int]
"""The phase (generate or sync), the rollout, and the signal."""


@pytest.fixture
def sabotage(tmp_path: Path, tiny_model: Path, prompts: Path) -> Callable[..., list[object]]:
    """Flags of a run in which an engine is struck by each blow: ``sabotage(("generate", 1,
    signal.SIGKILL))``.
    """
    file = tmp_path / "sabotage.py"
    file.write_text(SABOTAGE)

    def flags(*blows: Blow, rollouts: int = 4) -> list[object]:
        (tmp_path / "plan.json").write_text(json.dumps(blows))
        return [
            "--hf-checkpoint", tiny_model, "--prompt-data", prompts, "--apply-chat-template",
            "--custom-rm-path", f"{file}:reward", "--rollout-data-postprocess-path", f"{file}:in_trainer",
            "--custom-generate-function-path", f"{file}:generate", "--lr", "1e-3", "--num-rollout", rollouts,
            "--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--rollout-max-response-len", 64,
            "--train-backend", "fsdp", "--rollout-backend", "embedded", "--rollout-shuffle", *QUICK,
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
    return [
        {k: v for k, v in row.items() if not k.startswith(leave) and "cache" not in k}
        for row in rows
    ]


def struck(runner) -> list[int]:
    """Process ids of the engines that were struck."""
    return [int(file.read_text()) for file in runner.tmp.glob(f"struck-*-{runner.marker}")]


def assert_went_on(runner, result, strikes: int, rollouts: int = 4) -> list[dict]:
    assert result.code == 0, result.output
    rows = result.metrics()
    assert [row["rollout/step"] for row in rows] == list(range(rollouts))
    lost = [row["rollout/engine_lost_count"] for row in rows]
    assert sum(lost) == strikes, lost
    assert trained_groups(result.folder) == [
        list(range(4 * step, 4 * step + 4)) for step in range(rollouts)
    ]
    pids = struck(runner)
    assert len(pids) == strikes
    assert runner.wait_gone() == []
    assert not [
        p
        for p in pids
        if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE
    ]
    return rows


KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)
# An engine that was struck in a rollout is back in the next one.
APART: tuple[Blow, ...] = (
    ("generate", 1, KILL),
    ("sync", 2, STOP),
    ("generate", 4, STOP),
    ("sync", 5, KILL),
)
COLOCATED: tuple[Blow, ...] = (("generate", 1, KILL), ("generate", 3, STOP))
ROLLOUTS = 7


@pytest.fixture(scope="module")
def undisturbed() -> list[dict]:
    """The numbers of the run without blows; filled by the first test that needs them."""
    return []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("blows", "engines"),
    [pytest.param(APART, 1, id="apart"), pytest.param(COLOCATED, 2, id="colocated")],
)
def test_a_struck_run_equals_an_undisturbed_one(
    runner, sabotage, undisturbed, blows, engines
) -> None:
    """An engine is started again and gets the trainer's weights; if it is the only one, the
    requests wait for it.
    """
    if not undisturbed:
        whole = runner.run(*sabotage(rollouts=ROLLOUTS), name="whole")
        assert whole.code == 0, whole.output
        undisturbed += numbers(whole.metrics())
    more = ["--rollout-num-gpus", engines, "--distributed-timeout-minutes", 1]
    more += ["--colocate"] if blows is COLOCATED else []
    result = runner.run(*sabotage(*blows, rollouts=ROLLOUTS), *more, timeout=550)
    rows = assert_went_on(runner, result, len(blows), ROLLOUTS)
    assert numbers(rows) == undisturbed
    if engines == 1:  # otherwise the other engine takes the requests
        assert sum(row["rollout/http_retry_count"] for row in rows) > 0
        assert sum(row["rollout/engine_restart_count"] for row in rows) == len(blows)
        assert "started again, with the current weights" in result.output
    log = (result.folder / "logs" / "rollout-manager.log").read_text()
    for words in ("is lost: ", "is up again", "and waits for weights", "serves"):
        assert words in log, log


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "blow",
    [
        pytest.param(("generate", 1, KILL), id="generate"),
        pytest.param(("sync", 1, STOP), id="sync"),
    ],
)
def test_real_sglang_is_struck_and_comes_back(runner, sabotage, blow) -> None:
    """The only server, on the CPU: killed over its requests, or stopped in the middle of a weight
    update.
    """
    flags = [*sabotage(blow), "--distributed-timeout-minutes", 1]
    flags[flags.index("--deterministic")] = "--no-deterministic"
    flags[flags.index("embedded")] = "sglang"
    flags += ["--sglang-device", "cpu", "--sglang-max-total-tokens", 8192, "--phase-timeout", 400]
    rows = assert_went_on(runner, runner.run(*flags, timeout=800), 1)
    assert all(row["perf/audit_logprob_diff"] < 1e-3 for row in rows)
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-3 for row in rows)


@pytest.mark.slow
@pytest.mark.long
def test_engines_and_router_are_struck_from_outside(runner, sabotage) -> None:
    """At random moments; asynchronous, so that the trainer is often busy when an engine needs its
    weights.
    """
    flags = [*sabotage(rollouts=16), "--rollout-num-gpus", 2, "--async-buffer-size", 2]
    process = runner.start("--run-name", "run", *flags, script="train_async.py")
    metrics = runner.tmp / "outputs" / "run" / "metrics.jsonl"
    for count, (victim, number) in enumerate(
        [("engine", KILL), ("router", STOP), ("engine", STOP), ("router", KILL)]
    ):
        until = time.monotonic() + 200
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2 + 3 * count):
            assert process.poll() is None and time.monotonic() < until, (
                victim,
                number,
                process.communicate()[0],
            )
            time.sleep(0.05)
        os.kill(of_role(runner.marker, victim)[0].pid, number)
    result = runner.finish(process, "run", 200)
    assert result.code == 0, result.output
    rows = result.metrics()
    assert [row["rollout/step"] for row in rows] == list(range(16))
    assert sum(row["rollout/router_restart_count"] for row in rows) == 2
    assert runner.wait_gone() == []


@pytest.mark.slow
def test_without_fault_tolerance_the_run_ends_at_once_and_says_why(runner, sabotage) -> None:
    flags = [flag for flag in sabotage(("generate", 1, KILL)) if flag != "--use-fault-tolerance"]
    result = runner.run(*flags, "--rollout-num-gpus", 2)
    assert result.code not in (0, None)
    for words in ("was lost: its process", "ended", "--use-fault-tolerance goes on without it"):
        assert words in result.output, result.output
    assert runner.wait_gone() == []
    found = diagnose(read_facts(result.folder))
    assert found[0].kind == "process_lost" and "was lost: its process" in found[0].evidence[0]
