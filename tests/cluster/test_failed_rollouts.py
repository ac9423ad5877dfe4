"""A rollout whose samples all failed is told, with the first error; one whose samples are fine is
not.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from make_args import make_args

from slime.cluster.rollout_manager import RolloutManager
from slime.data.sample import Sample
from slime.engines.keys import RunKeys
from slime.observability.best_effort import take_warnings


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
    args = make_args(
        run_name=words, data_source_path=f"{__file__}:Rows", rollout_function_path=f"{__file__}:rollout",
        debug_rollout_only=True, num_rollout=1, rollout_batch_size=2, n_samples_per_prompt=2,
        rollout_external_engine_addrs=["127.0.0.1:1"],  # so that it starts none
    )  # fmt: skip
    take_warnings()
    layout: Any = None
    batch = RolloutManager(args, str(tmp_path), layout, layout, RunKeys()).generate(0)
    assert batch.metrics["rollout/failed_ratio"] == share
    told = [warning for warning in batch.warnings if "this step trains nothing" in warning]
    assert bool(told) == (said is not None)
    if said is not None:
        assert re.search(said, told[0])
