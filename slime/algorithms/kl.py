"""Estimators of KL(policy || base) from the log-probs of sampled tokens.

Source: J. Schulman, "Approximating KL Divergence" (2020). k1 is unbiased with high variance, k2 is biased with low
variance, and k3 is unbiased with low variance and never negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sequences import MAX_LOG_RATIO

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """Estimate the KL per token, with d = log π − log π_base.

    ========== =======================================
    k1         d
    k2         d² / 2
    k3         e^(−d) − 1 + d
    low_var_kl k3, clamped to [−10, 10]
    ========== =======================================

    Args:
        log_probs: Log-probs of the policy, of any shape. They may have a gradient.
        log_probs_base: Log-probs of the reference, with the same shape.
        kl_loss_type: One of :data:`KL_TYPES`.
        importance_ratio: π / π_old per token (``--use-unbiased-kl``). It makes the estimate unbiased if the tokens were
            sampled by π_old. The estimate is multiplied by it before the clamp, and it is not detached.

    Raises:
        ValueError: ``kl_loss_type`` is unknown.
    """
    difference = log_probs - log_probs_base
    if kl_loss_type == "k1":
        kl = difference
    elif kl_loss_type == "k2":
        kl = difference.square() / 2
    elif kl_loss_type in ("k3", "low_var_kl"):
        # expm1 computes e^(-d) - 1 exactly for small d, for which the subtraction would lose digits. The clamp is
        # inside, because an overflow that is clamped afterwards would still have an infinite gradient.
        kl = torch.expm1(-difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + difference
    else:
        raise ValueError(f"unknown --kl-loss-type {kl_loss_type!r}; one of {', '.join(KL_TYPES)}")
    if importance_ratio is not None:
        # The ratio is not detached. The KL is an expectation under the trained policy, so a part of its gradient comes
        # from the probabilities of the tokens.
        kl = importance_ratio * kl
    return kl.clamp(-10, 10) if kl_loss_type == "low_var_kl" else kl
