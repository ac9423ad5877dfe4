"""The clipped surrogate of PPO, with the optional dual clip.

Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7; the separate upper
bound ("clip higher") is from Yu et al., "DAPO" (2025); the dual clip is from Ye et al., "Mastering Complex
Control in MOBA Games with Deep Reinforcement Learning" (2020), eq. 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sequences import exp_ratio


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute L = max(−ρ A, −clip(ρ, 1−eps_clip, 1+eps_clip_high) A) per token, with ρ = exp(−ppo_kl).

    If A < 0 and ``eps_clip_c`` (c > 1) is given, the result is min(L, −c A), so that a token with a negative advantage
    and a very large ratio has a bounded loss.

    Args:
        ppo_kl: Log π_old − log π_θ, of any shape.
        advantages: The advantages, with the same shape.

    Returns:
        The loss and clipfrac (1 where the clip took effect), both with the same shape.
    """
    ratio = exp_ratio(-ppo_kl)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    # The maximum is the pessimistic choice: the clip removes the gain of a larger step, but never the loss.
    loss = torch.maximum(unclipped, clipped)
    clipfrac = (clipped > unclipped).to(loss.dtype)
    if eps_clip_c is not None:
        # For a negative advantage, the clip bounds the ratio only from below. Without the dual clip, the loss of a
        # token that the policy now samples much more often than before would be unbounded.
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, clipfrac
