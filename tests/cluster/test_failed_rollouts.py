"""What the rollout manager says of a rollout: the first error if all samples failed, and the speed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from make_args import make_args

from slime.cluster.rollout_manager import RolloutManager
from slime.data.sample import Sample
from slime.engines.keys import RunKeys
from slime.observability.files import take_warnings, warn


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager would redirect the output of its process, and set its environment and garbage
    collection.
    """
    monkeypatch.setattr("slime.plugins.actors.ray_actors.redirect_output", lambda *_: None)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr("slime.cluster.rollout_manager.exempt_from_proxy", lambda _: {})
    monkeypatch.setattr("slime.cluster.rollout_manager.GarbageCollection", Collection)


class Collection:
    def collect(self) -> None: ...


class Rows:
    """A data source of two groups of two samples. The label of each says what happens to it."""

    def __init__(self, args: Any) -> None:
        self.words = args.run_name.split("-")

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        samples = [
            Sample(prompt="p", label=word, group_index=i // 2, index=i)
            for i, word in enumerate(self.words)
        ]
        return [samples[:2], samples[2:]]

    def save(self, rollout_id: int) -> None: ...

    def load(self, rollout_id: int | None = None) -> None: ...


def rollout(
    args: Any, rollout_id: int, data_source: Rows, evaluation: bool = False
) -> list[list[Sample]]:
    groups = data_source.get_samples(2)
    for sample in (sample for group in groups for sample in group):
        sample.tokens, sample.response_length, sample.reward = [1, 2], 1, 0.0
        sample.status = Sample.Status.COMPLETED
        if sample.label == "failed":
            sample.status = Sample.Status.FAILED
            sample.metadata["error"] = f"KeyError of sample {sample.index}"
        elif sample.label == "empty":
            sample.tokens, sample.response_length = [1], 0
        elif sample.label == "masked":
            sample.loss_mask = [0]
    return groups


class Pool:
    """It has finished samples whenever it is asked."""

    def advance(self, *_: Any) -> None: ...


def pooled(
    args: Any, rollout_id: int, data_source: Rows, evaluation: bool = False
) -> list[list[Sample]]:
    return rollout(args, rollout_id, data_source)


pooled.open_pool = lambda *_: Pool()  # type: ignore[attr-defined]


def manager(tmp_path: Path, words: str, function: str) -> RolloutManager:
    args = make_args(
        run_name=words, data_source_path=f"{__file__}:Rows", rollout_function_path=f"{__file__}:{function}",
        debug_rollout_only=True, num_rollout=2, rollout_batch_size=2, n_samples_per_prompt=2,
        rollout_external_engine_addrs=["127.0.0.1:1"],  # so that it starts none
    )  # fmt: skip
    layout: Any = None
    return RolloutManager(args, tmp_path, layout, layout, RunKeys())


@pytest.mark.parametrize(
    ("words", "share", "said"),
    [
        ("failed-failed-failed-failed", 1.0, r"4 samples.*KeyError.*sample 0"),
        ("empty-masked-empty-failed", 1.0, r"4 samples.*KeyError.*sample 3"),
        ("empty-empty-empty-empty", 1.0, "0 response tokens"),
        ("failed-fine-fine-fine", 0.25, None),
        ("fine-fine-fine-fine", 0.0, None),
    ],
)
def test_a_step_without_anything_to_train_is_told(
    tmp_path: Path, words: str, share: float, said: str | None
) -> None:
    take_warnings()
    made = manager(tmp_path, words, "rollout")
    batch = made.generate(0)
    warn("the reward server is away")
    assert made.status()["warnings"] == ["the reward server is away"] == made.status()["warnings"]
    assert batch.metrics["rollout/failed_ratio"] == share
    told = [warning for warning in batch.warnings if "this step trains nothing" in warning]
    assert bool(told) == (said is not None)
    if said is not None:
        assert re.search(said, told[0])


def test_the_speed_of_a_pool_is_that_since_its_last_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It generates while the trainer trains, so most of its samples are there at once."""
    now = [100.0]
    monkeypatch.setattr("slime.cluster.rollout_manager.time.perf_counter", lambda: now[0])
    made = manager(tmp_path, "fine-fine-fine-fine", "pooled")
    assert made.open_pool(0, 2, 0)
    found = []
    for seconds in (4.0, 10.0):
        now[0] += seconds
        found.append(made.generate(len(found)).metrics["perf/longest_sample_tokens_per_sec"])
    assert found == [1 / 4, 1 / 10]
