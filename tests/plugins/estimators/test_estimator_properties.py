"""What holds for all rewards and log-probs: zero, order, limits, and agreement with formulas for
one token.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.algorithms.algorithm import Algorithm, EstimatorSettings
from slime.algorithms.grpo import Grpo
from slime.algorithms.sequences import Identity
from slime.config.algorithm import check_estimator, create_algorithm
from slime.plugins.estimators.dppo import binary_divergence
from slime.plugins.estimators.maxrl import relative_to_mean
from slime.plugins.estimators.sapo import Sapo, compute_sapo_loss
from slime.plugins.estimators.vespo import vespo_weight
from tests.every_algorithm import ALGORITHMS
from tests.make_args import make_args
from tests.plugins.estimators.scalar_losses import LOSSES

quick = settings(deadline=None, max_examples=60)
# never on an edge, where one-sided gradients differ
numbers = st.integers(-48, 48).map(lambda k: k / 16 + 0.0037)
tokens = st.lists(
    st.tuples(numbers, numbers.map(lambda x: -abs(x)), numbers), min_size=1, max_size=8
)
FLAGS = {
    "sapo_tau_negative": 1.5,
    "vespo_k_negative": 1.0,
    "dppo_delta": 0.1,
    "dppo_tau": 0.3,
    "k2_5_tau": 0.2,
}
HERE = [
    name
    for name, one in ALGORITHMS.items()
    if one.__module__.startswith("slime.plugins.estimators.")
]


def loss_of_tokens(
    algorithm: Algorithm, ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss and clipfrac of responses of one token each."""
    ones = torch.ones_like(advantages)
    algorithm = algorithm.of_samples({"returns": [ones]})
    return algorithm.sequence_loss(ppo_kl, log_probs, advantages, ones, [1] * len(ones), Identity())


@pytest.mark.parametrize("name", LOSSES)
@quick
@given(drawn=tokens)
def test_loss_and_gradient_of_each_token(
    name: str, drawn: list[tuple[float, float, float]]
) -> None:
    """``ppo_kl`` and the log-prob are taken as independent here: a weight without gradient has none
    for either.
    """
    args = make_args(advantage_estimator=name, eps_clip_high=0.28).with_values(**FLAGS)
    kl, log_probs, advantages = torch.tensor(drawn, dtype=torch.float64).unbind(1)
    kl, log_probs = kl.clone().requires_grad_(), log_probs.clone().requires_grad_()
    loss, clipfrac = create_algorithm(args).policy_loss(kl, log_probs, advantages)
    expected = [
        LOSSES[name](args, k, p, float(a))
        for k, p, a in zip(kl, log_probs, advantages, strict=True)
    ]
    torch.testing.assert_close(loss, torch.stack([x for x, _ in expected]))
    assert clipfrac.tolist() == [clipped for _, clipped in expected]
    leaves, kinds = (kl, log_probs), dict(allow_unused=True, materialize_grads=True)
    got = torch.autograd.grad(loss.sum(), leaves, **kinds)  # type: ignore[arg-type]
    wanted = torch.autograd.grad(torch.stack([x for x, _ in expected]).sum(), leaves, **kinds)  # type: ignore[arg-type]
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_absurd_ratios_keep_loss_and_gradient_finite(name: str, dtype: torch.dtype) -> None:
    new = torch.tensor([-500.0, -500.0, 0.0, 0.0, -1e-30, -1e-30], dtype=dtype, requires_grad=True)
    old = torch.tensor([0.0, 0.0, -500.0, -500.0, 0.0, 0.0], dtype=dtype)
    advantages = torch.tensor([1.0, -1.0] * 3, dtype=dtype)
    for flags in ({}, {"dppo_divergence": "kl"}):
        algorithm = create_algorithm(make_args(advantage_estimator=name).with_values(**flags))
        loss, clipfrac = loss_of_tokens(algorithm, old - new, new, advantages)
        (gradient,) = torch.autograd.grad(loss.sum(), new)
        assert all(bool(x.isfinite().all()) for x in (loss, clipfrac, gradient))
        assert loss.dtype == clipfrac.dtype == dtype


@pytest.mark.parametrize("name", HERE)
def test_a_class_says_whether_tokens_without_advantage_have_a_gradient(name: str) -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    algorithm = create_algorithm(make_args(advantage_estimator=name))
    moved = torch.tensor([-0.4, 0.7]) - log_probs
    loss, clipfrac = loss_of_tokens(algorithm, moved, log_probs, torch.zeros(2))
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    assert (not gradient.any()) is ALGORITHMS[name].zero_advantage_has_no_gradient
    assert not ALGORITHMS[name].zero_advantage_has_no_gradient or not clipfrac.any()


@pytest.mark.parametrize("name", sorted({*HERE} - {"maxrl"}))
def test_a_first_step_has_the_gradient_of_the_policy_gradient(name: str) -> None:
    """Where nothing has moved yet, each loss is −A log π for its gradient, whatever its flags."""
    log_probs = torch.tensor([-1.0, -2.0, -0.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    algorithm = create_algorithm(make_args(advantage_estimator=name).with_values(**FLAGS))
    moved = log_probs.detach() - log_probs
    loss, _ = loss_of_tokens(algorithm, moved, log_probs, advantages)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    torch.testing.assert_close(gradient, -advantages)


@quick
@given(st.lists(st.integers(0, 8).map(lambda k: k / 8), min_size=1, max_size=12))
def test_maxrl_sums_to_zero_and_does_not_depend_on_the_order(rewards: list[float]) -> None:
    result = relative_to_mean(rewards)
    assert sum(result) == pytest.approx(0, abs=1e-9)
    assert relative_to_mean(rewards[::-1]) == result[::-1]
    if len(set(rewards)) == 1:
        assert set(result) == {0.0}


def test_maxrl_takes_a_mean_that_is_only_rounding_for_none() -> None:
    assert math.fsum([0.1] * 10 + [-1.0]) > 0
    assert relative_to_mean([0.1] * 10 + [-1.0]) == [0.0] * 11


def test_the_example_of_maxrl_computes_the_same() -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "maxrl" / "maxrl.py"
    own, built_in = (
        create_algorithm(make_args(advantage_estimator=x)) for x in (f"{example}:MaxRL", "maxrl")
    )
    for rewards in ([1.0, 0.0, 0.0, 0.0], [0.0, 0.0], [0.5, 1.5], [-1.0, 0.5]):
        assert own.group_baseline(rewards) == pytest.approx(built_in.group_baseline(rewards))


def test_sapo_fades_on_both_sides_and_never_rises() -> None:
    """The gradient's weight 4 σ (1 − σ) is 1 at ratio 1 and less elsewhere."""
    ratio = torch.linspace(0.05, 4.0, 80, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(
        compute_sapo_loss(-ratio.log(), torch.ones(80).double(), 2.0, 2.0).sum(), ratio
    )
    weight = -slope.detach()
    assert (weight > 0).all() and (weight <= 1).all()
    assert abs(float(ratio.detach()[weight.argmax()]) - 1) < 0.06


def test_the_weight_of_vespo_is_largest_at_k_over_lambda_and_vanishes_at_both_ends() -> None:
    w = torch.linspace(0.01, 40.0, 4000, dtype=torch.float64)
    weight = vespo_weight(-w.log(), torch.full_like(w, 3.0), torch.full_like(w, 2.0))
    assert float(w[weight.argmax()]) == pytest.approx(1.5, abs=0.01)
    assert float(weight[0]) < 1e-4 and float(weight[-1]) < 1e-20


@quick
@given(st.floats(1e-6, 1 - 1e-6), st.floats(1e-6, 1 - 1e-6))
def test_binary_divergences_are_those_of_two_outcomes(new: float, old: float) -> None:
    p, q = (torch.tensor([x], dtype=torch.float64).log() for x in (new, old))
    kl = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
    assert binary_divergence(p, q, "tv").item() == pytest.approx(abs(new - old), abs=1e-12)
    assert binary_divergence(p, q, "kl").item() == pytest.approx(kl, rel=1e-6, abs=1e-9)
    assert binary_divergence(q, q, "kl").item() == pytest.approx(0, abs=1e-12)


def test_a_class_that_derives_from_one_with_flags_gets_their_defaults() -> None:
    class Mine(Sapo):
        pass

    given: Any = (torch.tensor([-0.4]), torch.tensor([-1.0]), torch.tensor([1.0]))
    args = make_args(advantage_estimator="sapo")
    loss = Mine(EstimatorSettings(own=SimpleNamespace())).policy_loss(*given)[0]
    assert torch.equal(loss, create_algorithm(args).policy_loss(*given)[0])


@pytest.mark.parametrize("name", ["sapo", "vespo", "dppo", "dppo_k2_5"])
def test_a_clip_range_that_is_not_read_is_told(name: str) -> None:
    assert create_algorithm(make_args(advantage_estimator=name)).notices() == []
    (notice,) = create_algorithm(make_args(advantage_estimator=name, eps_clip=0.1)).notices()
    assert "no effect" in notice


def test_luspo_tells_of_a_clip_of_tokens_as_gspo_does() -> None:
    assert create_algorithm(make_args(advantage_estimator="luspo")).notices()
    small = make_args(advantage_estimator="luspo", eps_clip=3e-4, eps_clip_high=4e-4)
    assert create_algorithm(small).notices() == []
    (problem,) = check_estimator(small.with_values(calculate_per_token_loss=True))
    assert "--calculate-per-token-loss" in problem


@pytest.mark.parametrize("name", ["dppo", "dppo_k2_5"])
def test_dppo_is_refused_without_the_log_probs_of_the_engine(name: str) -> None:
    args = make_args(advantage_estimator=name)
    (problem,) = check_estimator(args)
    assert "--use-rollout-logprobs" in problem
    assert check_estimator(args.with_values(use_rollout_logprobs=True)) == []


def test_advantages_are_those_of_grpo_but_for_two() -> None:
    other = {name for name in HERE if ALGORITHMS[name].group_baseline is not Grpo.group_baseline}
    assert other == {"maxrl", "k2_5", "otb", "rae"}


def test_clip_cov_leaves_out_its_share_whatever_the_ranks() -> None:
    generator = torch.Generator().manual_seed(2)
    lengths = [40] * 50
    batch = {
        "loss_masks": [torch.ones(n, dtype=torch.int32) for n in lengths],
        "log_probs": [torch.randn(n, generator=generator) - 2 for n in lengths],
        "sample_indices": list(range(50)),
        "rollout_id": 3,
    }
    advantages = [torch.full((n,), (-1.0) ** i) for i, n in enumerate(lengths)]
    flags = {"clip_cov_share": 0.05, "clip_cov_low": 0.5, "clip_cov_high": 9.0}
    algorithm = create_algorithm(make_args(advantage_estimator="clip_cov").with_values(**flags))
    whole = algorithm.over_ranks(batch, advantages, Identity())
    out = torch.cat(whole) == 0
    assert 70 <= int(out.sum()) <= 130, "about 5% of 2000 tokens"
    covariance = torch.cat(batch["log_probs"]) - torch.cat(batch["log_probs"]).mean()
    assert (covariance * torch.cat(advantages))[out].min() > 0.5
    # Two ranks with half of the samples each find the same, with the sums of both.
    halves = [slice(0, 25), slice(25, 50)]
    known: list[Tensor] = []
    for number in range(2):
        ranks = [OneOfTwo(algorithm, batch, advantages, half, known) for half in halves]
        known.append(ranks[0].sums[number] + ranks[1].sums[number])
    for half in halves:
        result = OneOfTwo(algorithm, batch, advantages, half, known).result
        assert all(torch.equal(a, b) for a, b in zip(result, whole[half], strict=True))


class OneOfTwo(Identity):
    """One of two ranks, which knows the first sums over both."""

    def __init__(
        self, algorithm: Algorithm, batch: Any, advantages: Any, half: slice, known: list[Tensor]
    ) -> None:
        self.sums: list[Tensor] = []
        self.known = known
        own = {name: x[half] if isinstance(x, list) else x for name, x in batch.items()}
        self.result = algorithm.over_ranks(own, advantages[half], self)

    def over_data(self, x: Tensor) -> Tensor:
        self.sums.append(x)
        return self.known[len(self.sums) - 1] if len(self.sums) <= len(self.known) else x
