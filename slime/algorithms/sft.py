"""Supervised fine-tuning: the negative log-likelihood of the response tokens that the mask selects."""

from __future__ import annotations

from torch import Tensor


def compute_sft_loss(log_probs: Tensor) -> Tensor:
    """Return −log π of each token, ``[R]``. The reduction applies the mask, which selects the turns of the
    assistant."""
    return -log_probs
