"""CISPO: clip the importance weight instead of the update, so that no token loses its gradient.

Source: MiniMax, "MiniMax-M1" (2025), eq. 4.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .sequences import exp_ratio


def compute_cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Per token, with ρ = exp(−ppo_kl) and sg = stop gradient:
    L = −sg(clip(ρ, 1−eps_clip, 1+eps_clip_high)) A log π_θ.

    Returns:
        loss and clipfrac (1 where the clip changed ρ), both of the shape of ``log_probs``.
    """
    ratio = exp_ratio(-ppo_kl.detach())
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -clipped * advantages * log_probs, (clipped != ratio).to(log_probs.dtype)


def cispo_loss(args: Any, ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`compute_cispo_loss` with the run's ``--eps-clip`` and ``--eps-clip-high``.

    A token with A = 0 counts as unclipped: samples whose advantages are all 0 may be left out of the step.
    """
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    loss, clipfrac = compute_cispo_loss(ppo_kl, log_probs, advantages, args.eps_clip, high)
    return loss, clipfrac * (advantages != 0)
