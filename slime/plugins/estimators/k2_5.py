"""The loss of Kimi K2.5: a ratio that is clipped on both sides whatever the advantage, and a
squared log-ratio.

Source: arXiv 2602.02276 (Kimi K2.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.algorithm import Row
from slime.algorithms.baselines import centred
from slime.algorithms.grpo import Grpo
from slime.algorithms.sequences import exp_ratio
from slime.config.flag import flag

from .shared import flags_or_defaults

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class K25Flags:
    _title = "estimator k2_5"

    k2_5_tau: float = flag(1e-3, low=0)
    """Coefficient of the squared log-ratio in the loss of k2_5"""


def log_ratio_penalty(ppo_kl: Tensor, tau: float) -> Tensor:
    """Return τ (log ρ)² per token, where log ρ = −ppo_kl; of any shape and floating dtype, with
    gradient.

    Its gradient is 2 τ log ρ ∇log π: towards the old policy, in proportion to the distance.

    Source: arXiv 2602.02276, the last term of the objective.
    """
    return tau * ppo_kl.square()


def compute_k2_5_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, tau: float
) -> tuple[Tensor, Tensor]:
    """Compute L = −clip(ρ, 1 − eps_clip, 1 + eps_clip_high) A + τ (log ρ)² per token, with ρ =
    exp(−ppo_kl).

    Outside of the range the first term has no gradient, also where PPO's has one.

    Returns:
        The loss and clipfrac (1 where the clip changed ρ), both of the shape of ``ppo_kl``.

    Source: arXiv 2602.02276, the objective.
    """
    ratio = exp_ratio(-ppo_kl)
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -clipped * advantages + log_ratio_penalty(ppo_kl, tau), (clipped != ratio).to(
        ratio.dtype
    )


class K25(Grpo):
    """The mean of the group as the baseline, and the loss of Kimi K2.5."""

    zero_advantage_has_no_gradient = False  # the regulariser has one
    row = Row(
        "r − mean of the group",
        "−clip(ρ)·A on both sides whatever A, + τ·(log ρ)²",
        "`--k2-5-tau`; `--calculate-per-token-loss` for the paper's mean over tokens",
        "Kimi Team 2026, arXiv 2602.02276",
    )

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        return centred(rewards)

    def policy_loss(
        self, ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        clip = self.settings
        own = flags_or_defaults(self.settings, K25Flags)
        return compute_k2_5_loss(
            ppo_kl, advantages, clip.eps_clip, clip.eps_clip_high, own.k2_5_tau
        )
