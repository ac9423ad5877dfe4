"""A rollout that is trained in parts while it is generated, against the same run without the flag.

The answers of the last group of each rollout are much longer than all others, so that the parts
before the last one can be trained early.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.plugins.tools.summary import read_trace

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
GENERATE = """
import asyncio
from slime.rollout.generate import generate as ask

async def generate(args, sample, sampling_params):
    last = sample.index // args.n_samples_per_prompt % args.rollout_batch_size == args.rollout_batch_size - 1
    length = args.rollout_max_response_len if last else 3 + sample.index % 5
    await asyncio.sleep(1.0 if last else 0.0)  # for a busy machine, whose trainer is slow
    return await ask(args, sample, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})
"""
# of time, and of who came first
BY_CHANCE = ("time", "perf/", "memory/", "rollout/avg_cached", "rollout/prefix_cache")
PARTS = ("--train-during-rollout", 4)


@pytest.fixture
def long_last(flags: list[Any], tmp_path: Path) -> list[Any]:
    """The flags of two steps in which the last group of a rollout ends much later than the
    others.
    """
    file = tmp_path / "long_last.py"
    file.write_text(GENERATE)
    return [
        *flags, "--rollout-max-response-len", 240, "--num-rollout", 2, "--lr", "1e-4",
        "--custom-generate-function-path", f"{file}:generate", "--save-interval", 1,
    ]  # fmt: skip


def trained(runner: Any, name: str, *flags: object, ray: bool = False) -> Any:
    own = (*flags, "--save", f"save_{name}", "--save-hf", f"hf_{name}")
    run = runner.run(*own, name=name) if ray else runner.inline(*own, name=name)
    assert run.code == 0, run.output
    return run


def numbers(run: Any) -> list[dict[str, Any]]:
    return [
        {name: x for name, x in row.items() if not name.startswith(BY_CHANCE)}
        for row in run.metrics()
    ]


def weights(run: Any) -> dict[str, torch.Tensor]:
    return load_file(run.folder.parent.parent / f"hf_{run.folder.name}" / "model.safetensors")


def files(run: Any) -> list[str]:
    """What was sampled, and the account of the groups."""
    samples = sorted((run.folder / "samples").glob("*.jsonl"))
    return [file.read_text() for file in (*samples, run.folder / "ledger.jsonl")]


def spans(run: Any, rollout_id: int, name: str) -> list[tuple[float, float]]:
    """Start and end of all spans of a name in the trace of a rollout, in order."""
    file = run.folder / "traces" / f"rollout_{rollout_id:06d}.json.gz"
    return sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in read_trace(file)
        if event["ph"] == "X" and event["name"] == name
    )


def assert_the_same_within_rounding(run: Any, plain: Any) -> None:
    for mine, theirs in zip(numbers(run), numbers(plain), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=1e-5, abs=2e-6), name
    assert all(row["train/grad_norm"] > 0.1 for row in numbers(run))
    mine, theirs = weights(run), weights(plain)
    for name, tensor in theirs.items():
        assert (mine[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
    assert files(run) == files(plain)


def assert_early(run: Any, ratio: float) -> None:
    """Parts were trained, and the first one before the last group of its rollout ended."""
    assert [row["perf/trained_during_rollout_ratio"] for row in run.metrics()] == [ratio] * 2
    for rollout_id in (0, 1):
        first = spans(run, rollout_id, "actor_train")[0]
        last = max(end for _, end in spans(run, rollout_id, "generate_and_rm_group"))
        assert first[1] < last


def test_the_step_is_that_of_the_whole_rollout_bit_for_bit(runner, long_last) -> None:
    """With the same packs: each is a group. The second run goes on from a snapshot, and is
    replayed.
    """
    packs = ("--micro-batch-size", 4, "--no-skip-zero-advantage-groups")
    plain = trained(runner, "plain", *long_last, *packs)
    parts = trained(runner, "parts", *long_last, *packs, *PARTS, "--dump-details", "details")
    assert numbers(parts) == numbers(plain) and files(parts) == files(plain)
    mine, theirs = weights(parts), weights(plain)
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    assert_early(parts, 0.75)

    resumed = trained(
        runner, "resumed", *long_last, *packs, *PARTS, "--load", "save_parts", "--ckpt-step", 0
    )
    assert numbers(resumed)[-1] == numbers(parts)[-1]
    for words in (("--sample", 17), ("--step", 1, "--through")):
        step = () if "--step" in words else ("--step", 1)
        replayed = runner.command("replay", parts.folder, *step, *words)
        assert "equal: this step is the recorded one, bit for bit" in replayed.output


@pytest.mark.long
def test_other_packs_give_the_same_step_within_rounding(
    runner, long_last, tmp_path: Path, capsys
) -> None:
    """With log-probs of a reference and of the old policy, a mean over all tokens, and a filter
    that drops a group.
    """
    file = tmp_path / "filters.py"
    file.write_text("def keep(args, group):\n    return group[0].index // 4 % 8 != 1\n")
    more = (
        *("--use-kl-loss", "--kl-loss-coef", "0.1", "--keep-old-actor"),
        *("--calculate-per-token-loss", "--dynamic-sampling-filter-path", f"{file}:keep"),
    )
    plain = trained(runner, "plain", *long_last, *more)
    parts = trained(runner, "parts", *long_last, *more, *PARTS, "--dump-details", "details")
    assert_the_same_within_rounding(parts, plain)
    assert all(row["perf/trained_during_rollout_ratio"] > 0 for row in parts.metrics())
    replayed = runner.command("replay", parts.folder, "--step", 1)
    assert "equal: this step is the recorded one, bit for bit" in replayed.output
    refused = runner.command("replay", parts.folder, "--step", 1, "--sample", 20)
    assert refused.code == 1 and "--calculate-per-token-loss" in capsys.readouterr().err


@pytest.mark.long
def test_parts_are_made_in_the_order_in_which_groups_finish(runner, long_last) -> None:
    """Without --deterministic, also if the first group is the longest. A part has two groups."""
    own = [str(flag).replace("long_last.py", "long_first.py") for flag in long_last]
    file = runner.tmp / "long_first.py"
    file.write_text(GENERATE.replace("== args.rollout_batch_size - 1", "== 0"))
    flags = (*own, "--train-during-rollout", 2, "--dump-details", "details")
    run = trained(runner, "run", *flags, "--no-deterministic")
    assert_early(run, 0.5)
    replayed = runner.command("replay", run.folder, "--step", 1)
    assert replayed.code == 0 and "equal within the tolerance" in replayed.output
    # In the order of submission, nothing is finished before the first group is.
    plain = trained(runner, "plain", *flags)
    assert [row["perf/trained_during_rollout_ratio"] for row in plain.metrics()] == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_of_a_run_with_ray(runner, long_last) -> None:
    ranks = ("--actor-num-gpus-per-node", 2)
    plain = trained(runner, "plain", *long_last, *ranks, ray=True)
    parts = trained(runner, "parts", *long_last, *ranks, *PARTS, ray=True)
    assert_the_same_within_rounding(parts, plain)
    assert_early(parts, 0.75)


KILLS = """
import os
import signal

calls = 0

def weigh(*, pg_loss, loss_masks, **given):
    global calls
    calls += 1
    # once, in the first part of the second step
    if STRUCK is not None and calls == 5 and not os.path.exists(STRUCK):
        open(STRUCK, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return pg_loss, loss_masks, {}
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_that_is_lost_in_a_part_is_replaced(runner, long_last) -> None:
    file = runner.tmp / "kills.py"
    struck = runner.tmp / "struck"
    flags = (
        *(*long_last, *PARTS, "--micro-batch-size", 4, "--no-skip-zero-advantage-groups"),
        *("--use-tis", "--custom-tis-function-path", f"{file}:weigh", "--use-fault-tolerance"),
    )
    file.write_text("STRUCK = None\n" + KILLS)
    whole = trained(runner, "whole", *flags, ray=True)
    file.write_text(f"STRUCK = {str(struck)!r}\n" + KILLS)
    run = trained(runner, "run", *flags, ray=True)
    assert struck.exists() and "the engines stayed" in run.output
    assert numbers(run)[-1] == numbers(whole)[-1]
    assert all(torch.equal(weights(run)[name], x) for name, x in weights(whole).items())


def test_an_error_in_a_part_ends_the_run(runner, long_last) -> None:
    file = runner.tmp / "weights.py"
    file.write_text("def weigh(**given):\n    raise ValueError('no weights today')\n")
    run = runner.inline(
        *long_last, *PARTS, "--use-tis", "--custom-tis-function-path", f"{file}:weigh"
    )
    assert run.code == 1 and "no weights today" in run.output


@pytest.mark.parametrize(
    "more",
    [
        ("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages"),
        ("--advantage-estimator", "ppo"),
        ("--advantage-estimator", "gdpo"),
        ("--num-steps-per-rollout", 2),
        ("--partial-rollout",),
        ("--over-sampling-batch-size", 8),
        ("--fp16",),
        ("--offload-train",),
        ("--rollout-function-path", "own.py:generate"),
        ("--loss-type", "sft_loss"),
    ],
    ids=str,
)
def test_what_needs_the_whole_rollout_first_is_refused(runner, flags, more) -> None:
    run = runner.inline(*flags, *PARTS, *more)
    assert run.code == 2 and "--train-during-rollout 4" in run.output, run.output
