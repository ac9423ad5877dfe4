"""CISPO: clip the importance weight instead of the update, so that no token loses its gradient.

Source: MiniMax, "MiniMax-M1" (2025), eq. 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .algorithm import Row
from .grpo import Grpo
from .sequences import exp_ratio

if TYPE_CHECKING:
    from torch import Tensor


def compute_cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Compute L = −sg(clip(ρ, 1−eps_clip, 1+eps_clip_high)) A log π_θ per token.

    Here ρ = exp(−ppo_kl), and sg is the stop gradient.

    Returns:
        The loss and clipfrac (1 where the clip changed ρ), both with the shape of ``log_probs``.
    """
    # The ratio is a weight without a gradient; the gradient comes only from the log-prob. So a clipped token has a
    # smaller gradient, but never none, unlike in the clipped surrogate of PPO.
    ratio = exp_ratio(-ppo_kl.detach())
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -clipped * advantages * log_probs, (clipped != ratio).to(log_probs.dtype)


class Cispo(Grpo):
    """GRPO's advantages; the clip bounds the weight of a token's gradient, and never removes the gradient."""

    zero_advantage_has_no_gradient = True  # the loss is a product with the advantage
    row = Row(
        "as `grpo`",
        "−clip(ρ)·A·log π, no gradient through ρ",
        "`--eps-clip 1` for no lower clip",
        "MiniMax 2025, MiniMax-M1",
    )

    def policy_loss(self, ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        clip = self.settings
        loss, clipfrac = compute_cispo_loss(ppo_kl, log_probs, advantages, clip.eps_clip, clip.eps_clip_high)
        # Tokens with A = 0 count as not clipped. A step may skip samples whose advantages are all 0, and the metric
        # must not depend on that.
        return loss, clipfrac * (advantages != 0)

    def notices(self) -> list[str]:
        low = self.settings.eps_clip
        if low >= 1:
            return []
        return [
            f"cispo has a lower clip of the weight at {1 - low:g} (--eps-clip {low}); the paper has none (--eps-clip 1)"
        ]
