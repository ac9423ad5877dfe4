"""The clipped surrogate of PPO, with the optional dual clip.

Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7; separate upper
bound ("clip higher") from Yu et al., "DAPO" (2025); dual clip from Ye et al., "Mastering Complex
Control in MOBA Games with Deep Reinforcement Learning" (2020), eq. 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sequences import exp_ratio


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """Per token, with ρ = exp(−ppo_kl): L = max(−ρ A, −clip(ρ, 1−eps_clip, 1+eps_clip_high) A).

    Where A < 0 and ``eps_clip_c`` (c > 1) is given: min(L, −c A), so that one very unlikely token with
    a negative advantage has a bounded loss.

    Args:
        ppo_kl: log π_old − log π_θ, any shape.
        advantages: same shape.

    Returns:
        loss and clipfrac (1 where the clip took effect), both of that shape.
    """
    ratio = exp_ratio(-ppo_kl)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    # The pessimistic one of both: the clip takes away what a larger step would gain, and never what it would lose.
    loss = torch.maximum(unclipped, clipped)
    clipfrac = (clipped > unclipped).to(loss.dtype)
    if eps_clip_c is not None:
        # For a negative advantage the clip bounds the ratio from below only. A token that the policy now samples far
        # more often than before would have a loss without a bound.
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, clipfrac
