"""A fully asynchronous run from the command line: updates go through while groups generate."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from slime.data.sample import flatten
from slime.data.staleness import UNKNOWN, token_staleness
from slime.observability.debug_data import load_rollout
from slime.observability.samples import read_samples

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
STEPS = 6


def samples_of(folder: Path, rollout_id: int) -> list:
    return flatten(load_rollout(str(folder / "{rollout_id}.pt"), rollout_id))


def test_weights_change_under_way_and_no_trained_token_is_older_than_the_bound(
    runner, flags, tmp_path
) -> None:
    """The share of the label's letter is trained on answers of up to 300 tokens, of which each
    update divides some.
    """
    evaluation = tmp_path / "eval.jsonl"
    evaluation.write_text('{"prompt": "Write the letter a.", "label": "a"}\n' * 3)
    result = runner.inline(
        *flags, "--rollout-function-path", FULLY_ASYNC, "--async-buffer-size", 3, "--max-weight-staleness", 2,
        "--num-rollout", STEPS, "--rollout-max-response-len", 300, "--save-debug-rollout-data",
        tmp_path / "dump" / "{rollout_id}.pt", "--eval-interval", 2, "--eval-prompt-data", "letters", evaluation,
        "--eval-max-response-len", 40, "--skip-eval-before-train", script="train_async.py",
    )  # fmt: skip
    assert result.code == 0, result.output
    assert "at most 2 step(s)" in result.output and "--use-tis is on" in result.output
    rows = result.metrics()
    assert [row["rollout/step"] for row in rows] == list(range(STEPS))
    oldest, divided, trained = 0, 0, []
    for step in range(STEPS):
        samples = samples_of(tmp_path / "dump", step)
        trained += sorted({sample.group_index for sample in samples})
        ages = [token_staleness(sample, step) for sample in samples]
        for sample, age in zip(samples, ages, strict=True):
            assert len(age) == sample.response_length == len(sample.rollout_log_probs)
            assert UNKNOWN not in age and age.min() >= 0
            assert [end for _, _, end in sample.version_spans[:-1]] == [
                start for _, start, _ in sample.version_spans[1:]
            ]
            divided += len(sample.version_spans) > 1
        assert rows[step]["rollout/staleness/max"] == max(age.max() for age in ages)
        oldest = max(oldest, *(age.max() for age in ages))
    assert trained == list(range(4 * STEPS)), "in the order of admission, each once"
    assert 0 < oldest <= 2
    assert divided, "an update went through while samples were generated"
    by_age = [
        {name for name in row if name.startswith("train/logprob_gap_staleness_")} for row in rows
    ]
    assert by_age[0] == set() and max(map(len, by_age)) >= 2, (
        "a gap for each age of which a step has tokens"
    )
    assert all(math.isfinite(row["train/tis_clipfrac"]) for row in rows)
    assert all("perf/staleness_wait_time" in row for row in rows)
    assert [row["eval/step"] for row in result.metrics("eval/step")] == [2, 4, 6]
    for step in (2, 4, 6):
        (path,) = (result.folder / "samples").glob(f"eval-letters_{step:06d}.jsonl")
        evaluated = [row["version_spans"] for row in read_samples(path)]
        assert {version for spans in evaluated for version, _, _ in spans} == {f"0.{step}"}, (
            "of one version"
        )
    assert runner.wait_gone() == []


def test_in_drain_mode_no_answer_mixes_weights(runner, flags, tmp_path) -> None:
    """Buffered: groups of several rollouts at once, all finished before each update."""
    result = runner.inline(
        *flags, "--rollout-function-path", FULLY_ASYNC, "--async-buffer-size", 2, "--update-weights-interval", 2,
        "--update-weight-pause-mode", "drain", "--num-rollout", 4, "--rollout-max-response-len", 100,
        "--save-debug-rollout-data", tmp_path / "dump" / "{rollout_id}.pt", script="train_async.py",
    )  # fmt: skip
    assert result.code == 0, result.output
    assert [row["rollout/step"] for row in result.metrics()] == list(range(4))
    samples = [samples_of(tmp_path / "dump", step) for step in range(4)]
    assert all(len(sample.version_spans) == 1 for of_step in samples for sample in of_step)
    assert all(row["rollout/several_versions_ratio"] == 0 for row in result.metrics())
    assert sum("perf/drain_time" in row for row in result.metrics()) == 2
    versions = [sample.version_spans[0][0] for of_step in samples for sample in of_step]
    assert versions == sorted(versions) and versions[0] == "0.0"
    assert runner.wait_gone() == []
