"""The losses of pairs by numbers worked by hand, and what such a loss sets and refuses."""

from __future__ import annotations

import math

import pytest
import torch

from slime.backends.base import TrainNeeds
from slime.backends.loss import compute_loss
from slime.backends.loss_inputs import LossSettings, TokenBatch
from slime.config.args import Args
from slime.config.resolve import validate
from slime.config.rules import Run
from slime.data.schedule import PackingSettings
from slime.plugins.preference import ROLLOUT, SOURCE, check
from slime.plugins.preference.losses import dpo_loss
from tests.make_args import CPU_MACHINE, make_args, rule_problems


def pair_args(loss: str = "dpo", **more: object) -> Args:
    return make_args(loss_type=loss, train_backend="fsdp", **more)


def of_pairs(**entries: torch.Tensor) -> TokenBatch:
    """Two pairs: responses of 2, 1, 1 and 2 tokens; the last token is masked."""
    return TokenBatch(
        response_lengths=[2, 1, 1, 2],
        total_lengths=[4, 3, 3, 4],
        loss_mask=torch.tensor([1, 1, 1, 1, 1, 0]),
        rollout_mask_sums=torch.tensor([3.0, 3.0, 2.0, 2.0]),
        **entries,
    )


def test_dpo_by_hand() -> None:
    # log-ratios: chosen 1 - 0.5 = 0.5, rejected -1.5 ; chosen 0, rejected 2 (and a masked token)
    tokens = of_pairs(
        log_probs=torch.tensor([-1.0, -1.5, -3.0, -2.0, -1.0, math.nan], requires_grad=True),
        ref_log_probs=torch.tensor([-2.0, -1.0, -1.5, -2.0, -3.0, 0.0]),
    )
    settings = LossSettings.from_args(pair_args(dpo_beta=0.5))
    loss, metrics = compute_loss(settings, tokens, num_rollouts=2, num_tokens=5)
    # margins 0.5 · 2 = 1 and 0.5 · -2 = -1: -log σ(1) = 0.313262, -log σ(-1) = 1.313262
    assert loss.item() == pytest.approx((0.313262 + 1.313262) / 2, abs=1e-6)
    expected = {"preference_accuracy": 0.5, "preference_margin": 0.0}
    expected |= {"chosen_reward": 0.125, "rejected_reward": 0.125}
    assert {name: metrics[name].item() for name in expected} == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(loss, [tokens.log_probs])
    # -β σ(-margin) / 2 pairs: σ(-1) = 0.268941, σ(1) = 0.731059
    first, second = 0.25 * 0.268941, 0.25 * 0.731059
    assert gradient.tolist() == pytest.approx([-first, -first, first, -second, second, 0], abs=1e-6)


def test_label_smoothing_by_hand() -> None:
    zero, two = torch.tensor([0.0]), torch.tensor([2.0])
    # 0.9 · 0.126928 + 0.1 · 2.126928
    assert dpo_loss(two, zero, 1.0, 0.1).item() == pytest.approx(0.326928, abs=1e-6)
    smoothed = LossSettings.from_args(pair_args(dpo_label_smoothing=0.1, dpo_beta=1.0))
    tokens = of_pairs(
        log_probs=torch.tensor([1.0, 1.0, 0.0, 2.0, 0.0, 0.0]), ref_log_probs=torch.zeros(6)
    )
    loss, _ = compute_loss(smoothed, tokens, num_rollouts=2, num_tokens=5)
    assert loss.item() == pytest.approx(0.326928, abs=1e-6)


def test_bradley_terry_by_hand() -> None:
    tokens = TokenBatch(
        response_lengths=[2, 1, 1, 2],
        total_lengths=[4, 3, 3, 4],
        loss_mask=torch.tensor([0, 1, 1, 1, 0, 1]),  # the last token of each
        rollout_mask_sums=torch.full((4,), 2.0),
        values=torch.tensor([9.0, 2.0, 1.0, 0.5, 9.0, 1.5], requires_grad=True),
    )
    settings = LossSettings.from_args(pair_args("reward_model"))
    loss, metrics = compute_loss(settings, tokens, num_rollouts=2, num_tokens=4)
    assert loss.item() == pytest.approx((0.313262 + 1.313262) / 2, abs=1e-6)
    assert metrics["preference_accuracy"].item() == 0.5
    (gradient,) = torch.autograd.grad(loss, [tokens.values])
    first, second = 0.5 * 0.268941, 0.5 * 0.731059
    assert gradient.tolist() == pytest.approx([0, -first, first, -second, 0, second], abs=1e-6)


@pytest.mark.parametrize("loss", ["dpo", "reward_model"])
def test_a_loss_of_pairs_sets_its_rollout(loss: str) -> None:
    args = pair_args(loss)
    assert (args.rollout_function_path, args.data_source_path) == (ROLLOUT, SOURCE)
    assert args.n_samples_per_prompt == 1 and not args.compute_advantages_and_returns
    assert PackingSettings.from_args(args).whole_rollouts
    needs = TrainNeeds.from_args(args)
    assert needs.ref_log_probs is (loss == "dpo") and not needs.trains
    assert pair_args(loss, data_source_path="mine.Source").data_source_path == "mine.Source"
    assert not PackingSettings.from_args(make_args()).whole_rollouts
    assert not TrainNeeds.from_args(make_args()).ref_log_probs


@pytest.mark.parametrize(
    ("loss", "flags", "problem"),
    [
        ("dpo", {"calculate_per_token_loss": True}, "--calculate-per-token-loss"),
        ("dpo", {"entropy_coef": 0.1}, "--entropy-coef"),
        ("dpo", {"n_samples_per_prompt": 2}, "--n-samples-per-prompt"),
        ("dpo", {"label_key": None}, "--label-key"),
        ("reward_model", {}, "--debug-train-only"),
        ("reward_model", {"debug_train_only": True, "lora_rank": 4}, "--lora-rank"),
    ],
)
def test_what_does_not_fit_is_told(loss: str, flags: dict[str, object], problem: str) -> None:
    args = pair_args(loss)
    for name, value in flags.items():
        setattr(args, name, value)
    assert any(problem in line for line in [*check(args), *rule_problems(args)])


def test_nothing_is_told_of_what_fits() -> None:
    for args in (pair_args(), make_args(), pair_args("reward_model", debug_train_only=True)):
        told = [*check(args), *rule_problems(args)]
        assert not [line for line in told if "--loss-type" in line]
    assert not [
        line for line in validate(Run(pair_args(), machine=CPU_MACHINE)) if "--loss-type" in line
    ]
