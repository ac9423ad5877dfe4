"""Training ranks that are killed or freeze: new ones go on from the last snapshot, and the engines
stay.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from test_async_faults import assert_accounted, numbers

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

SABOTAGE = '''
"""A hook of the trainer that strikes its own rank, and notes which engines there are."""
import json
import os
from pathlib import Path

import psutil

HERE = Path(__file__).parent
RUN = os.environ["SLIME_TEST_RUN"]


def engines():
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLIME_TEST_RUN") == RUN and "slime.plugins.embedded.server" in process.cmdline():
                found.append(process.pid)
        except psutil.Error:
            continue
    return sorted(found)


def strike(phase, rollout, number):
    """Once per run."""
    try:
        (HERE / f"struck-{phase}-{rollout}").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), number)


def in_trainer(args, rollout_id, rollout_data):
    import torch

    rank = torch.distributed.get_rank()
    if rank == 0:
        with open(HERE / "engines", "a") as file:
            file.write(json.dumps(engines()) + "\\n")
    for phase, rollout, victim, number in json.loads((HERE / "plan.json").read_text()):
        if rollout == rollout_id and rank == victim:
            strike(phase, rollout, number) if phase == "train" else arm(rollout, number)


def arm(rollout, number):
    """Strike in the middle of the next weight update."""
    from slime.engines import handle

    push = handle.EngineHandle.push

    async def deadly(self, bucket, *more):
        if bucket.index == 3:
            strike("sync", rollout, number)
        await push(self, bucket, *more)

    handle.EngineHandle.push = deadly
'''
Blow = tuple[str, int, int, int]
"""The phase (train or sync), the rollout, the rank, and the signal."""
KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)


@pytest.fixture
def sabotage(tmp_path: Path, flags: list[object]) -> Callable[..., list[object]]:
    """Flags of a run of seven rollouts in which ranks are struck: ``sabotage(("train", 2, 0,
    signal.SIGKILL))``.
    """
    file = tmp_path / "sabotage.py"
    file.write_text(SABOTAGE)
    common = [
        *flags, "--rollout-data-postprocess-path", f"{file}:in_trainer", "--use-fault-tolerance", "--deterministic",
        "--rollout-max-response-len", 32, "--num-rollout", 7, "--save-interval", 2, "--status-timeout", 15,
        "--update-weight-buffer-size", 20000, "--phase-timeout", 300, "--distributed-timeout-minutes", 1,
    ]  # fmt: skip

    def struck(*blows: Blow) -> list[object]:
        (tmp_path / "plan.json").write_text(json.dumps(blows))
        (tmp_path / "engines").unlink(missing_ok=True)
        return common

    return struck


def assert_only_ranks_were_replaced(runner, result, times: int) -> None:
    assert_accounted(result, 7)
    rows = result.metrics()
    assert sum(row["perf/trainer_restart_count"] for row in rows) == times
    assert result.output.count("the engines stayed") == times
    assert "more restarts, --max-restarts" not in result.output
    noted = [json.loads(line) for line in (runner.tmp / "engines").read_text().splitlines()]
    assert noted[0] and all(pids == noted[0] for pids in noted), noted
    assert runner.wait_gone() == []


CASES = {
    "one_rank": (1, (("train", 3, 0, KILL), ("sync", 5, 0, KILL))),
    "two_ranks": (2, (("train", 3, 1, KILL),)),
    "two_ranks_twice": (2, (("train", 3, 1, KILL), ("train", 5, 1, STOP))),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[pytest.mark.long] if name != "two_ranks" else []) for name in CASES],
)
def test_a_run_that_lost_ranks_equals_an_undisturbed_one(runner, sabotage, case) -> None:
    ranks, blows = CASES[case]
    more = ["--actor-num-gpus-per-node", ranks, "--rollout-num-gpus", 1]
    whole = runner.run(*sabotage(), *more, "--save", runner.tmp / "whole", name="whole")
    assert_accounted(whole, 7)
    result = runner.run(*sabotage(*blows), *more, "--save", runner.tmp / "saved", timeout=500)
    assert_only_ranks_were_replaced(runner, result, len(blows))
    assert numbers(result.metrics()) == numbers(whole.metrics())


@pytest.mark.long
@pytest.mark.parametrize("fully", [False, True], ids=["one_step", "fully"])
def test_ranks_of_an_asynchronous_run(runner, sabotage, fully) -> None:
    """Rollouts are in progress when the rank is lost. One-step runs promise the same numbers."""
    more = ["--save-interval", 1, "--async-buffer-size", 1]
    if fully:
        function = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
        more = ["--async-buffer-size", 2, "--rollout-function-path", function]
    flags = [*sabotage(("train", 3, 0, KILL)), *more, "--save", runner.tmp / "saved"]
    result = runner.run(*flags, script="train_async.py", timeout=500)
    assert_only_ranks_were_replaced(runner, result, 1)
    if not fully:
        whole = runner.run(
            *sabotage(),
            *more,
            "--save",
            runner.tmp / "whole",
            name="whole",
            script="train_async.py",
        )
        assert numbers(result.metrics()) == numbers(whole.metrics())


@pytest.mark.long
def test_before_the_first_snapshot_the_whole_run_is_restarted(runner, sabotage) -> None:
    result = runner.run(
        *sabotage(("train", 0, 0, KILL)), "--save", runner.tmp / "saved", timeout=500
    )
    assert_accounted(result, 7)
    said = (
        "the engines cannot stay while training ranks are replaced: there is no snapshot yet "
        "(--save-interval)"
    )
    assert (
        result.output.count(said) == 1 and result.output.count("more restarts, --max-restarts") == 1
    )
    assert runner.wait_gone() == []
