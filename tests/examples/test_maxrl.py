"""MaxRL as a file of the user: its numbers worked by hand, from the rewards to the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from example_scripts import EXAMPLES, load_example

from slime.algorithms.algorithm import EstimatorSettings
from slime.algorithms.sequences import Identity
from slime.backends.advantages import AdvantageSettings, compute_advantages
from slime.backends.base import TrainNeeds
from slime.backends.loss import LossSettings, compute_loss
from slime.backends.loss_inputs import TokenBatch
from slime.config.algorithm import algorithm_class
from slime.data.rewards import post_process_rewards
from slime.data.sample import Sample
from tests.make_args import make_args

PATH = f"{EXAMPLES}/maxrl/maxrl.py:MaxRL"


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [3, -1, -1, -1]),  # mean 1/4: (1 - 1/4) / (1/4) = 3
        ([1, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, -1]),  # mean 3/4: (1/4) / (3/4) = 1/3
        ([0.5, 1.5], [-0.5, 0.5]),  # mean 1
        ([0, 0, 0], [0, 0, 0]),
        ([-1, 0.5], [0, 0]),  # mean -1/4
        ([0.1, 0.1, 0.1], [0, 0, 0]),
    ],
)
def test_the_advantage_is_relative_to_the_mean(rewards: list[float], expected: list[float]) -> None:
    maxrl = load_example("maxrl/maxrl.py").MaxRL(EstimatorSettings())
    assert maxrl.group_baseline(rewards) == pytest.approx(expected, abs=1e-12)


def test_two_groups_from_their_rewards_to_the_loss() -> None:
    """Worked by hand: the groups' rewards 1, 0 and 0, 0 give advantages 1, -1, 0, 0 (mean 1/2 and
    0). In a first step the ratio is 1, so each token's loss is -A: the means over the tokens of
    each rollout are -1, 1, 0, 0, their sum 0, and the gradient of the first rollout's two tokens is
    -1/2 each, over 4 rollouts -1/8."""
    args = make_args(advantage_estimator=PATH)
    samples = [Sample(index=i, reward=reward) for i, reward in enumerate([1.0, 0.0, 0.0, 0.0])]
    raw, rewards = post_process_rewards(args, samples, [0, 0, 1, 1])
    assert raw == [1.0, 0.0, 0.0, 0.0] and rewards == [1.0, -1.0, 0.0, 0.0]
    lengths = [2, 1, 1, 1]
    batch: dict[str, Any] = {
        "tokens": [torch.zeros(n + 1, dtype=torch.int64) for n in lengths],
        "rewards": rewards,
        "response_lengths": lengths,
        "total_lengths": [n + 1 for n in lengths],
        "loss_masks": [torch.ones(n) for n in lengths],
        "rollout_mask_sums": [float(n) for n in lengths],
    }
    compute_advantages(AdvantageSettings.from_args(args), batch, Identity())
    assert [a.tolist() for a in batch["advantages"]] == [[1.0, 1.0], [-1.0], [0.0], [0.0]]
    log_probs = torch.full((5,), -0.7, requires_grad=True)
    tokens = TokenBatch.from_rank_batch(batch, range(4), log_probs=log_probs)
    loss, metrics = compute_loss(LossSettings.from_args(args), tokens, num_rollouts=4, num_tokens=5)
    assert loss.item() == 0.0 and metrics["ois"].item() == 1.0
    loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-0.125, -0.125, 0.25, 0.0, 0.0])


def test_it_inherits_what_grpo_says_of_itself() -> None:
    args = make_args(advantage_estimator=PATH)
    assert not args.use_critic and algorithm_class(PATH).needs_group
    assert TrainNeeds.from_args(args).skips_zero_advantages
    assert args.run_name.startswith("run-MaxRL-")
