"""VACO: a trust region of whole responses. Where a response has moved too far from the policy that
sampled it, only tokens that come back are trained.

Source: arXiv 2603.01365, after a summary: the estimate of the divergence and the default of its
bound are this file's, and were not compared with the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.algorithm import Row
from slime.algorithms.sequences import IDENTITY, Reduce, exp_ratio, sequence_means, spread
from slime.config.flag import flag

from .shared import EngineTrustRegion, flags_or_defaults, notice_of_unused_clip

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class VacoFlags:
    _title = "estimator vaco"

    vaco_delta: float = flag(0.1, above=0)
    """Total variation of a response above which vaco trains only tokens that lower it; 0.1 is that
    of ratios of 0.8 or 1.2"""


def vaco_keep(
    ppo_kl: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    delta: float,
    reduce: Reduce = IDENTITY,
) -> Tensor:
    """Return 1 for tokens that are trained, else 0, ``[R]``, without gradient.

    The total variation of a response is estimated by the mean of |ρ − 1| / 2 over its tokens, which
    the old policy has sampled. Where it is above ``delta``, a token stays only if its update lowers
    |ρ − 1|: if A (ρ − 1) < 0.

    Args:
        ppo_kl, advantages, mask: ``[R]``; log ρ = −ppo_kl.
        lengths: The number of tokens of each response.
    """
    away = exp_ratio(-ppo_kl.detach()) - 1
    variation = sequence_means(away.abs() / 2, mask, lengths, reduce)
    far = spread(variation > delta, lengths)
    return 1 - (far & (advantages * away >= 0)).to(ppo_kl.dtype)


class Vaco(EngineTrustRegion):
    """GRPO's advantages in a trust region of responses around the engine's policy."""

    zero_advantage_has_no_gradient = True  # the loss is a product with the advantage
    row = Row(
        "as `grpo`",
        "−ρ·A, 0 where the mean of abs(ρ − 1)/2 over the response is above δ and the token does not "
        "lower it",
        "needs `--use-rollout-logprobs`; `--vaco-delta`",
        "arXiv 2603.01365, after a summary",
    )

    def sequence_loss(
        self,
        ppo_kl: Tensor,
        log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        lengths: Sequence[int],
        reduce: Reduce,
    ) -> tuple[Tensor, Tensor]:
        own = flags_or_defaults(self.settings, VacoFlags)
        keep = vaco_keep(ppo_kl, advantages, mask, lengths, own.vaco_delta, reduce)
        # A token without advantage has no loss, and does not count as left out.
        return -keep * exp_ratio(-ppo_kl) * advantages, (1 - keep) * (advantages != 0)

    def notices(self) -> list[str]:
        return notice_of_unused_clip("vaco", self.settings)
