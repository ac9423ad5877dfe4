"""On-policy distillation: move the student towards a teacher on the student's own samples.

Source: Agarwal et al., "On-Policy Distillation of Language Models" (2024); as an advantage term, Lu et
al. (Thinking Machines), "On-Policy Distillation" (2025).
"""

from __future__ import annotations

from torch import Tensor

from .sequences import keep_where


def reverse_kl(student_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return log π_student − log π_teacher, ``[R]``: a one-sample estimate of KL(student ‖ teacher) of each token, 0 if
    it is masked. All arguments are ``[R]``."""
    return keep_where(mask, student_log_probs - teacher_log_probs)


def distilled_advantages(advantages: Tensor, kl: Tensor, coefficient: float) -> Tensor:
    """Return A_t − coefficient · kl_t, ``[R]`` like both tensors."""
    return advantages - coefficient * kl
