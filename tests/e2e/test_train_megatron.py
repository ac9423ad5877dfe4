"""train.py with real megatron-core on the CPU: two ranks, the embedded engine, every weight sync
audited.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from needs import ALL

CHECKOUT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.megatron, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]


def on_cpu(compiled: bool = False) -> list[object]:
    """Flags of a run whose trainers find megatron-core ready for the CPU.

    Args:
        compiled: Whether each rank compiles what Megatron compiles, which takes most of the time.
    """
    site = CHECKOUT / "tests" / "plugins" / "megatron" / "cpu_site"
    paths = os.pathsep.join([str(site), str(CHECKOUT)])
    variables = {"PYTHONPATH": paths} | ({} if compiled else {"TORCHDYNAMO_DISABLE": "1"})
    return ["--train-backend", "megatron", "--train-env-vars", json.dumps(variables)]


ADAPTER = ["--lora-rank", 4, "--lr", 1e-3]


def trains_as_fsdp(runner, flags: list[object], *more: object) -> Path:
    """Same samples (the engine is deterministic), same losses, until rounding has changed a sampled
    token.

    Returns the folder of the run with two ranks.
    """
    common = [*flags, "--num-rollout", 2, "--check-weight-update-equal"]
    one = runner.inline(*common, name="fsdp")
    assert one.code == 0, one.output
    two = runner.run(
        *common, "--actor-num-gpus-per-node", 2, *more, *on_cpu(), name="megatron", timeout=600
    )
    assert two.code == 0, two.output
    ours, theirs = two.metrics(), one.metrics()
    assert len(ours) == len(theirs) == 2
    assert math.isclose(ours[0]["train/loss"], theirs[0]["train/loss"], abs_tol=5e-6)
    assert math.isclose(ours[0]["train/grad_norm"], theirs[0]["train/grad_norm"], rel_tol=1e-4)
    for row in ours:
        assert row["train/grad_norm"] > 0
        assert row["perf/audit_logprob_diff"] < 1e-3
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-3
    assert runner.wait_gone() == []
    return two.folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "more"),
    # only the factors are sent
    [("--pipeline-model-parallel-size", []), ("--tensor-model-parallel-size", ADAPTER)],
)
def test_two_ranks_train_as_one_of_fsdp(runner, flags, layout: str, more: list[object]) -> None:
    trains_as_fsdp(runner, [*flags, *more], layout, 2)


@pytest.mark.more
def test_two_ranks_train_as_one_of_fsdp_and_their_step_is_replayed_by_them_and_by_one(
    runner, flags
) -> None:
    kept = ["--save", "saved", "--save-interval", 1, "--dump-details", "details"]
    folder = trains_as_fsdp(runner, flags, "--tensor-model-parallel-size", 2, *kept)

    def again(name: str, *words: object) -> str:
        # a run records no values of --train-env-vars
        result = runner.command(name, folder, "--step", 1, *words, *on_cpu()[2:], fork=False)
        assert result.code == 0, result.output
        return result.output

    said = again("replay")
    assert (
        "equal: this step is the recorded one, bit for bit" in said and "2 ranks, TP 2" in said
    ), said
    if not ALL:
        return
    said = again("replay", "--tensor-model-parallel-size", 1, "--actor-num-gpus-per-node", 1)
    assert "equal within the tolerance" in said and "1 rank" in said, said
    found = again("gap")
    assert "first cause: rounding: another order of sums" in found, found
