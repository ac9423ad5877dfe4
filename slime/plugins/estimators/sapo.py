"""SAPO: a soft gate in place of the clip, so that a token's gradient fades instead of ending at an
edge.

Source: arXiv 2511.20347.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.algorithm import Row
from slime.algorithms.grpo import Grpo
from slime.algorithms.sequences import exp_ratio
from slime.config.flag import flag

from .shared import by_sign, flags_or_defaults, notice_of_unused_clip

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class SapoFlags:
    """The temperature for negative advantages is the higher one: they raise all other tokens, which
    is less stable.
    """

    _title = "estimator sapo"

    sapo_tau_positive: float = flag(1.0, above=0)
    """Temperature of SAPO's gate for tokens with positive advantage"""
    sapo_tau_negative: float = flag(1.05, above=0)
    """Temperature of SAPO's gate for tokens with negative advantage"""


def compute_sapo_loss(
    ppo_kl: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float
) -> Tensor:
    """Compute L = −(4/τ) σ(τ (ρ − 1)) A per token, with ρ = exp(−ppo_kl), and τ by the sign of A.

    The gradient is −4 σ (1 − σ) ρ A ∇log π: the whole one at ρ = 1, and less on both sides.

    Args:
        ppo_kl: Log π_old − log π_θ, of any shape and floating dtype.
        advantages: The advantages, with the same shape.

    Returns:
        The loss, with the same shape.

    Source: arXiv 2511.20347, the gate f(ρ) of the token-level objective.
    """
    tau = by_sign(advantages, tau_positive, tau_negative)
    return -4 / tau * (tau * (exp_ratio(-ppo_kl) - 1)).sigmoid() * advantages


class Sapo(Grpo):
    """GRPO with the soft gate."""

    zero_advantage_has_no_gradient = True  # the loss is a product with the advantage
    row = Row(
        "as `grpo`",
        "−(4/τ)·σ(τ(ρ − 1))·A, τ by the sign of A",
        "`--sapo-tau-positive`, `--sapo-tau-negative`",
        "arXiv 2511.20347",
    )

    def policy_loss(
        self, ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        own = flags_or_defaults(self.settings, SapoFlags)
        loss = compute_sapo_loss(ppo_kl, advantages, own.sapo_tau_positive, own.sapo_tau_negative)
        return loss, loss.new_zeros(loss.shape)  # nothing is clipped

    def notices(self) -> list[str]:
        return notice_of_unused_clip("sapo", self.settings)
