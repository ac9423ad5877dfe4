"""Losses per token: the clipped surrogate of PPO, the critic's regression, fine-tuning, KL and
distillation.

Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7; the separate
upper bound ("clip higher") is from Yu et al., "DAPO" (2025); the dual clip is from Ye et al.,
"Mastering Complex Control in MOBA Games with Deep Reinforcement Learning" (2020), eq. 5. The
critic's loss has the value clipping of OpenAI's baselines, as analyzed in Engstrom et al.,
"Implementation Matters in Deep Policy Gradients" (2020).

KL: J. Schulman, "Approximating KL Divergence" (2020). k1 is unbiased with high variance, k2 is
biased with low variance, and k3 is unbiased with low variance and never negative.

On-policy distillation moves the student towards a teacher on the student's own samples: Agarwal et
al., "On-Policy Distillation of Language Models" (2024); as an advantage term, Lu et al. (Thinking
Machines), "On-Policy Distillation" (2025).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sequences import MAX_LOG_RATIO, exp_ratio, keep_where


def compute_policy_loss(
    ppo_kl: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute L = max(−ρ A, −clip(ρ, 1−eps_clip, 1+eps_clip_high) A) per token, with ρ =
    exp(−ppo_kl).

    If A < 0 and ``eps_clip_c`` (c > 1) is given, the result is min(L, −c A), so that a token with a
    negative advantage and a very large ratio has a bounded loss.

    Args:
        ppo_kl: Log π_old − log π_θ, of any shape.
        advantages: The advantages, with the same shape.

    Returns:
        The loss and clipfrac (1 where the clip took effect), both with the same shape.
    """
    ratio = exp_ratio(-ppo_kl)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    # The maximum is the pessimistic choice: the clip removes the gain of a larger step, but never
    # the loss.
    loss = torch.maximum(unclipped, clipped)
    clipfrac = (clipped > unclipped).to(loss.dtype)
    if eps_clip_c is not None:
        # For a negative advantage, the clip bounds the ratio only from below. Without the dual
        # clip, the loss of a token that the policy now samples much more often than before would be
        # unbounded.
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, clipfrac


def compute_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float
) -> tuple[Tensor, Tensor]:
    """Compute max((V − ret)², (V_old + clip(V − V_old, ±value_clip) − ret)²) per token, without a
    factor ½.

    Returns:
        The loss and clipfrac (1 where the clipped term is larger), both with the shape of
        ``values``.
    """
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    plain_error = (values - returns).square()
    clipped_error = (clipped - returns).square()
    return torch.maximum(plain_error, clipped_error), (clipped_error > plain_error).to(values.dtype)


def compute_sft_loss(log_probs: Tensor) -> Tensor:
    """Return −log π of each token, ``[R]``. The reduction applies the mask, which selects the turns
    of the assistant."""
    return -log_probs


KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    kl_loss_type: str,
    importance_ratio: Tensor | None = None,
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
        importance_ratio: π / π_old per token (``--use-unbiased-kl``). It makes the estimate
            unbiased if the tokens were sampled by π_old. The estimate is multiplied by it before
            the clamp, and it is not detached.

    Raises:
        ValueError: ``kl_loss_type`` is unknown.
    """
    difference = log_probs - log_probs_base
    if kl_loss_type == "k1":
        kl = difference
    elif kl_loss_type == "k2":
        kl = difference.square() / 2
    elif kl_loss_type in ("k3", "low_var_kl"):
        # expm1 computes e^(-d) - 1 exactly for small d, for which the subtraction would lose
        # digits. The clamp is inside, because an overflow that is clamped afterwards would still
        # have an infinite gradient.
        kl = torch.expm1(-difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + difference
    else:
        raise ValueError(f"unknown --kl-loss-type {kl_loss_type!r}; one of {', '.join(KL_TYPES)}")
    if importance_ratio is not None:
        # The ratio is not detached. The KL is an expectation under the trained policy, so a part of
        # its gradient comes from the probabilities of the tokens.
        kl = importance_ratio * kl
    return kl.clamp(-10, 10) if kl_loss_type == "low_var_kl" else kl


def reverse_kl(student_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return log π_student − log π_teacher, ``[R]``: a one-sample estimate of KL(student ‖ teacher)
    of each token, 0 if it is masked. All arguments are ``[R]``."""
    return keep_where(mask, student_log_probs - teacher_log_probs)


def distilled_advantages(advantages: Tensor, kl: Tensor, coefficient: float) -> Tensor:
    """Return A_t − coefficient · kl_t, ``[R]`` like both tensors."""
    return advantages - coefficient * kl
