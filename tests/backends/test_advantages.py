"""Means over a rollout's samples as the trainer logs them, all and the correct ones apart; dumps of
train batches.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime.backends.advantages import _check_shapes, correct_sample_metrics, rollout_metrics
from slime.data.rewards import shares_in_rollouts
from slime.observability.debug_data import save_train_batches


def batch() -> dict[str, object]:
    return {
        "tokens": [torch.arange(4), torch.arange(5), torch.arange(3)],
        "raw_reward": [1.0, 0.0, 0.75],
        "rewards": [0.5, -0.5, 0.0],
        "response_lengths": [2, 3, 1],
        "truncated": [0, 1, 0],
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([1, 0, 1]), torch.tensor([0])],
        "log_probs": [
            torch.tensor([-1.0, -3.0]),
            torch.tensor([-5.0, -99.0, -7.0]),
            torch.tensor([-8.0]),
        ],
        "sample_indices": [7, 5, 6],
    }


BACKEND = SimpleNamespace(
    reduce=SimpleNamespace(total=list), world_size=1, rank=0, data_parallel_rank=0
)


def test_means_by_hand() -> None:
    metrics = rollout_metrics(BACKEND, batch())
    assert (
        metrics["rollout/raw_reward"] == pytest.approx(1.75 / 3)
        and metrics["rollout/response_lengths"] == 2.0
    )
    assert metrics["rollout/log_probs"] == -4.0, (
        "masked means of the two samples that have trained tokens"
    )
    assert "rollout/values" not in metrics


def test_a_sample_whose_verifier_gave_no_answer_is_in_no_reward_statistics() -> None:
    timed_out = {**batch(), "raw_reward": [1.0, 0.0, float("nan")]}
    assert rollout_metrics(BACKEND, timed_out)["rollout/raw_reward"] == 0.5
    assert correct_sample_metrics(BACKEND, timed_out)["rollout/correct_ratio"] == 0.5


def test_rewards_count_rollouts_wherever_their_samples_are_trained() -> None:
    """Three leaves of one session with the reward 1, two of which another rank trains, and a
    rollout with 0.4.
    """
    whole = {
        "raw_reward": [1.0, 1.0, 1.0, 0.4],
        "rewards": [1.0, 1.0, 1.0, -1.0],
        "truncated": [1, 1, 1, 0],
    }
    whole |= {
        "tokens": [torch.arange(2)] * 4,
        "loss_masks": [torch.tensor([1])] * 4,
        "rollout_ids": [0, 0, 0, 1],
    }
    shares = shares_in_rollouts(whole["rollout_ids"], whole["raw_reward"])
    sent: list[list[float]] = []
    collect = SimpleNamespace(
        reduce=SimpleNamespace(total=lambda numbers: sent.append(numbers) or numbers)
    )
    for rank in (slice(0, 1), slice(1, 4)):
        part = {name: values[rank] for name, values in whole.items()}
        rollout_metrics(collect, part | {"rollout_shares": shares[rank]})
    total = [sum(both) for both in zip(*sent, strict=True)]
    both = SimpleNamespace(reduce=SimpleNamespace(total=lambda _: total))
    for backend, batch in ((BACKEND, whole), (both, whole | {"rollout_shares": shares})):
        metrics = rollout_metrics(backend, batch)
        assert metrics["rollout/raw_reward"] == pytest.approx(0.7) and metrics[
            "rollout/rewards"
        ] == pytest.approx(0.0)
        assert metrics["rollout/truncated"] == 0.75, "a property of a sample"
    assert correct_sample_metrics(BACKEND, whole)["rollout/correct_ratio"] == pytest.approx(0.5)


def test_correct_samples_apart() -> None:
    """trap 5: they reach the metrics, also where log-probs are not recomputed"""
    metrics = correct_sample_metrics(BACKEND, batch())
    assert metrics == {
        "rollout/correct_ratio": pytest.approx(2 / 3),
        "rollout/correct-response_lengths": 1.5,
        "rollout/correct-truncated": 0.0,
        "rollout/correct-log_probs": -2.0,
    }
    reused = {name: value for name, value in batch().items() if name != "log_probs"}
    assert "rollout/correct-log_probs" not in correct_sample_metrics(BACKEND, reused)
    none = {**batch(), "raw_reward": [0.0, -1.0, float("nan")]}
    assert correct_sample_metrics(BACKEND, none) == {"rollout/correct_ratio": 0.0}


def test_advantages_that_a_function_forgot_are_told() -> None:
    with pytest.raises(ValueError, match=r"mine\.py:f needs to set advantages"):
        _check_shapes({"response_lengths": [1], "returns": [torch.ones(1)]}, "mine.py:f")


def test_a_dump_of_train_batches(tmp_path: Path) -> None:
    save_train_batches(str(tmp_path / "batch_{rollout_id}.pt"), 3, batch(), BACKEND)
    dump = torch.load(tmp_path / "batch_3.pt", weights_only=False)
    assert dump["rollout_id"] == 3 and dump["raw_reward"] == [0.0, 0.75, 1.0], (
        "in the order of the samples' indices"
    )
    assert [sample["sample_indices"] for sample in dump["samples"]] == [5, 6, 7] and len(
        dump["dp_shards"]
    ) == 1
