"""KL-Cov: the tokens that lower the entropy most are held near the old policy.

Source: Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
(arXiv 2505.22617), KL-Cov. The entropy falls with the covariance of log-probs and advantages.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from slime.algorithms.algorithm import Algorithm, Entries, Row
from slime.algorithms.grpo import Grpo
from slime.algorithms.sequences import Reduce, exp_ratio, flatten
from slime.config.flag import flag

from .clip_cov import covariances_of_batch
from .shared import flags_or_defaults, notice_of_unused_clip

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class KlCovFlags:
    _title = "estimator kl_cov"

    kl_cov_share: float = flag(2e-4, above=0, high=1)
    """Share of all tokens, those with the highest covariance, that kl_cov holds near the old policy"""
    kl_cov_coef: float = flag(1.0, low=0)
    """Coefficient of the distance to the old policy in the loss of these tokens"""


def kth_largest(values: Tensor, k: int, reduce: Reduce) -> Tensor:
    """Return the k-th largest of the finite float32 values ``[R]`` of all ranks, a scalar.

    Its bits are found one after the other, each by a count over all ranks, so no rank needs the
    values of others.
    """
    import torch

    bits = values.float().view(torch.int32).long()
    # As integers, floats have their order; negative ones have the reverse one.
    places = torch.where(bits < 0, ~bits & 0xFFFFFFFF, bits | 0x80000000)
    place = 0
    for bit in reversed(range(32)):
        higher = place | 1 << bit
        if int(reduce.over_data((places >= higher).double().sum())) >= k:
            place = higher
    found = place & 0x7FFFFFFF if place & 0x80000000 else ~place & 0xFFFFFFFF
    return torch.tensor(found, dtype=torch.int64).to(torch.int32).view(torch.float32)


def compute_kl_cov_loss(
    ppo_kl: Tensor, advantages: Tensor, chosen: Tensor, coefficient: float
) -> tuple[Tensor, Tensor]:
    """Compute L = −ρ A + coefficient · (ρ − 1 − log ρ) · chosen per token, with ρ = exp(−ppo_kl);
    and ``chosen``.

    All tensors have the same shape; ``chosen`` is 0 or 1. Tokens of the old policy estimate KL(old ‖
    new) without bias by ρ − 1 − log ρ. The authors' code has |log ρ|, whose gradient is ±1 where
    both policies differ only by rounding.

    Source: arXiv 2505.22617, KL-Cov.
    """
    ratio = exp_ratio(-ppo_kl)
    return -ratio * advantages + coefficient * (ratio - 1 + ppo_kl) * chosen, chosen


class KlCov(Grpo):
    """GRPO without a clip, where the share of tokens with the highest covariance has a penalty.

    The covariance is that of the whole rollout before its first step. The authors' code takes that
    of the current policy over each step. ``returns``, which nobody else reads, are 1 for the chosen
    tokens.
    """

    needs_old_log_probs = True
    zero_advantage_has_no_gradient = False  # the penalty has one
    forbids: ClassVar[Mapping[str, str]] = {
        "custom_advantage_function_path": "the chosen tokens are kept where it sets the returns",
    }
    chosen: Tensor | None = None
    row = Row(
        "as `grpo`",
        "−ρ·A, + β·(ρ − 1 − log ρ) for the share r of all tokens with the highest "
        "(log π_old − mean)·(A − mean)",
        "`--kl-cov-share` r, `--kl-cov-coef` β",
        "arXiv 2505.22617",
    )

    def over_ranks(self, batch: Entries, advantages: list[Tensor], reduce: Reduce) -> list[Tensor]:
        own = flags_or_defaults(self.settings, KlCovFlags)
        mask, covariance, count = covariances_of_batch(batch, advantages, reduce)
        lowest = float("-inf")
        known = covariance.float().masked_fill(~mask, lowest)
        least = kth_largest(known, max(int(own.kl_cov_share * count), 1), reduce)
        chosen = mask & (known >= least.to(known.device))
        for returns, part in zip(
            batch["returns"], chosen.split([len(one) for one in advantages]), strict=True
        ):
            returns.copy_(part)
        return advantages

    def of_samples(self, entries: Mapping[str, Sequence[Any]]) -> Algorithm:
        import torch

        made = copy.copy(self)
        if "returns" in entries:
            made.chosen = flatten([torch.as_tensor(one) for one in entries["returns"]])
        return made

    def policy_loss(
        self, ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        own = flags_or_defaults(self.settings, KlCovFlags)
        chosen = advantages.new_zeros(()) if self.chosen is None else self.chosen.to(advantages)
        return compute_kl_cov_loss(
            ppo_kl, advantages, chosen.expand_as(advantages), own.kl_cov_coef
        )

    def notices(self) -> list[str]:
        return notice_of_unused_clip("kl_cov", self.settings)
