"""GMPO: the geometric mean of a response's ratios in place of the arithmetic one, which a single
token with a large ratio cannot dominate.

Source: arXiv 2507.20673.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.algorithm import Row
from slime.algorithms.grpo import Grpo
from slime.algorithms.sequences import IDENTITY, Reduce, exp_ratio, sequence_means, spread
from slime.config.flag import flag

from .shared import flags_or_defaults, notice_of_unused_clip

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class GmpoFlags:
    _title = "estimator gmpo"

    gmpo_clip: float = flag(0.4, above=0)
    """GMPO clips the log-ratio of a token to this range in the direction of its advantage"""


def compute_gmpo_loss(
    ppo_kl: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    clip: float,
    reduce: Reduce = IDENTITY,
) -> tuple[Tensor, Tensor]:
    """Compute L = −exp(mean over the response of log ρ′) A for each token, where log ρ′ is log ρ,
    but at most ``clip`` where A > 0 and at least −``clip`` where A < 0.

    Args:
        ppo_kl, advantages, mask: ``[R]``; log ρ = −ppo_kl.
        lengths: The number of tokens of each response.

    Returns:
        The loss and clipfrac (1 where the clip changed log ρ), ``[R]``.

    Source: arXiv 2507.20673, the objective with its clip per token.
    """
    direction = advantages.sign()
    moved = -ppo_kl * direction
    bounded = moved.clamp(max=clip) * direction
    ratio = exp_ratio(sequence_means(bounded, mask, lengths, reduce))
    return -spread(ratio, lengths) * advantages, (moved > clip).to(ppo_kl.dtype)


class Gmpo(Grpo):
    """GRPO with one ratio per response, the geometric mean of its tokens' clipped ratios."""

    zero_advantage_has_no_gradient = True  # the loss is a product with the advantage
    row = Row(
        "as `grpo`",
        "−ρ·A, ρ: exp(mean over the response of log ρ, clipped per token in the direction of A)",
        "`--gmpo-clip`, of log ρ",
        "arXiv 2507.20673",
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
        own = flags_or_defaults(self.settings, GmpoFlags)
        return compute_gmpo_loss(ppo_kl, advantages, mask, lengths, own.gmpo_clip, reduce)

    def notices(self) -> list[str]:
        return notice_of_unused_clip("gmpo", self.settings)
