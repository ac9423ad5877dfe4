"""Estimators of KL(policy || base) from the log-probs of sampled tokens.

Source: J. Schulman, "Approximating KL Divergence" (2020): k1 is unbiased with high variance, k2 is
biased with low variance, k3 is unbiased with low variance and never negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sequences import MAX_LOG_RATIO

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """KL estimate per token, with d = log π − log π_base.

    ========== =======================================
    k1         d
    k2         d² / 2
    k3         e^(−d) − 1 + d
    low_var_kl k3, clamped to [−10, 10]
    ========== =======================================

    Args:
        log_probs: of the policy, any shape, may carry a gradient.
        log_probs_base: of the reference, same shape.
        kl_loss_type: one of :data:`KL_TYPES`.
        importance_ratio: π / π_old per token (``--use-unbiased-kl``): makes the estimate unbiased when
            the tokens were sampled by π_old. Multiplied in before the clamp, and not detached.

    Raises:
        ValueError: an unknown ``kl_loss_type``.
    """
    difference = log_probs - log_probs_base
    if kl_loss_type == "k1":
        kl = difference
    elif kl_loss_type == "k2":
        kl = difference.square() / 2
    elif kl_loss_type in ("k3", "low_var_kl"):
        # expm1 keeps e^(-d) - 1 exact for small d, where the subtraction would lose its digits. The clamp is inside: an
        # overflow that is cut off afterwards would still have an infinite gradient.
        kl = torch.expm1(-difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + difference
    else:
        raise ValueError(f"unknown --kl-loss-type {kl_loss_type!r}; one of {', '.join(KL_TYPES)}")
    if importance_ratio is not None:
        # The ratio is not detached: the estimate is an expectation under the policy that is trained, so its gradient
        # has a part through the probabilities of the tokens.
        kl = importance_ratio * kl
    return kl.clamp(-10, 10) if kl_loss_type == "low_var_kl" else kl
