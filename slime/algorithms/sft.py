"""Supervised fine-tuning: the negative log-likelihood of the response tokens that the mask selects."""

from __future__ import annotations

from torch import Tensor


def compute_sft_loss(log_probs: Tensor) -> Tensor:
    """−log π per token; the reduction applies the mask (only the assistant's turns)."""
    return -log_probs
