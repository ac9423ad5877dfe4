"""VESPO: one smooth weight for each sequence, which vanishes for ratios near 0 and for very large
ones.

Source: arXiv 2602.10693.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.algorithm import Row
from slime.algorithms.grpo import Grpo
from slime.algorithms.sequences import (
    IDENTITY,
    MAX_LOG_RATIO,
    Reduce,
    keep_where,
    sequence_sums,
    spread,
)
from slime.config.flag import flag

from .shared import by_sign, flags_or_defaults, notice_of_unused_clip

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class VespoFlags:
    """A higher k suppresses small ratios more, a higher λ large ones."""

    _title = "estimator vespo"

    vespo_k_positive: float = flag(2.0, low=0)
    """Exponent k of VESPO's weight where the advantage is positive"""
    vespo_lambda_positive: float = flag(3.0, low=0)
    """Decay λ of VESPO's weight where the advantage is positive"""
    vespo_k_negative: float = flag(3.0, low=0)
    """Exponent k of VESPO's weight where the advantage is negative"""
    vespo_lambda_negative: float = flag(2.0, low=0)
    """Decay λ of VESPO's weight where the advantage is negative"""


def sequence_sum_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    reduce: Reduce = IDENTITY,
) -> Tensor:
    """Return for each token ``[R]`` the sum of log π_old − log π_θ over the unmasked tokens of its
    whole sequence.

    All tensors are flat ``[R]``, of one floating dtype but for the mask; ``lengths`` are those of
    the sequences.
    """
    # Masked tokens are part of the sequence, but not of its ratio.
    difference = keep_where(mask, old_log_probs - log_probs)
    return spread(reduce.over_sequence(sequence_sums(difference, lengths)), lengths)


def vespo_weight(ppo_kl: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """Return φ(W) = W^k · exp(λ (1 − W)) without gradient, where W = exp(−ppo_kl) is the ratio of
    the sequence.

    φ(1) = 1, and φ is largest at W = k/λ. All tensors have the same shape and floating dtype.

    Source: arXiv 2602.10693, the reshaping kernel.
    """
    log_ratio = (-ppo_kl.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # One exponential of the whole logarithm: the power alone can overflow where the product is 0.
    return (k * log_ratio + decay * (1 - log_ratio.exp())).exp()


def compute_vespo_loss(
    ppo_kl: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Tensor:
    """Compute L = −φ(W) A log π_θ per token. The gradient comes only from the log-prob.

    Args:
        ppo_kl: −log W, the value of the sequence at each of its tokens, of any shape and floating
            dtype.
        log_probs, advantages: Of each token, with the same shape.
        positive, negative: (k, λ) by the sign of the advantage.

    Source: arXiv 2602.10693, the gradient of the objective.
    """
    k, decay = (by_sign(advantages, p, n) for p, n in zip(positive, negative, strict=True))
    return -vespo_weight(ppo_kl, k, decay) * advantages * log_probs


class Vespo(Grpo):
    """GRPO's advantages, with the weight of the whole sequence."""

    zero_advantage_has_no_gradient = True  # the loss is a product with the advantage
    row = Row(
        "as `grpo`",
        "−φ(W)·A·log π, φ(W) = W^k·e^{λ(1 − W)} without gradient, W: ρ of the whole sequence "
        "(product); k, λ by the sign of A",
        "`--vespo-k-positive`, `--vespo-lambda-positive`, `--vespo-k-negative`, "
        "`--vespo-lambda-negative`",
        "arXiv 2602.10693",
    )

    def ppo_kl(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        mask: Tensor,
        lengths: Sequence[int],
        reduce: Reduce,
    ) -> Tensor:
        return sequence_sum_kl(log_probs, old_log_probs, mask, lengths, reduce)

    def policy_loss(
        self, ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        own = flags_or_defaults(self.settings, VespoFlags)
        positive = own.vespo_k_positive, own.vespo_lambda_positive
        negative = own.vespo_k_negative, own.vespo_lambda_negative
        loss = compute_vespo_loss(ppo_kl, log_probs, advantages, positive, negative)
        return loss, loss.new_zeros(loss.shape)  # nothing is clipped

    def notices(self) -> list[str]:
        return notice_of_unused_clip("vespo", self.settings)
