"""Corrections for tokens that were sampled by an engine whose probabilities differ from those of the trainer.

Both functions are built-in ``--custom-tis-function-path`` hooks. Such a hook is called with the keyword arguments
``args``, ``pg_loss`` (flat, per token), ``train_log_probs``, ``rollout_log_probs``, ``loss_masks``, ``total_lengths``
and ``response_lengths`` (one entry per sample). It returns ``(pg_loss, loss_masks, metrics)``, where metrics are flat
and per token.

Sources: truncated importance sampling from Ionides (2008), for this mismatch in Yao et al., "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); IcePop from the Ring-1T
report of Ling Team, "Every Step Evolves" (2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .sequences import exp_ratio, flatten, keep_where

Parts = Sequence[Tensor]
"""One tensor per sample."""
TisResult = tuple[Tensor, list[Tensor], dict[str, Tensor]]


class Bounds(Protocol):
    """The flags that the two functions read."""

    tis_clip: float
    tis_clip_low: float


def train_rollout_ratio(loss_masks: Parts, train_log_probs: Parts, rollout_log_probs: Parts) -> Tensor:
    """Return exp(log π_train − log π_rollout) of each token, flat ``[R]`` and without gradient; 1 for masked tokens.
    The arguments have one tensor ``[response_length]`` per sample."""
    difference = flatten(train_log_probs).detach() - flatten(rollout_log_probs).detach()
    return exp_ratio(keep_where(flatten(loss_masks), difference))


def vanilla_tis_function(
    *, args: Bounds, pg_loss: Tensor, loss_masks: Parts, train_log_probs: Parts, rollout_log_probs: Parts, **_: object
) -> TisResult:
    """Multiply the loss by the ratio, which is clamped to [``tis_clip_low``, ``tis_clip``]."""
    ratio = train_rollout_ratio(loss_masks, train_log_probs, rollout_log_probs)
    weight = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weight, list(loss_masks), _metrics(ratio, weight)


def icepop_function(
    *, args: Bounds, pg_loss: Tensor, loss_masks: Parts, train_log_probs: Parts, rollout_log_probs: Parts, **_: object
) -> TisResult:
    """Multiply the loss by the ratio if it is in [``tis_clip_low``, ``tis_clip``], and otherwise by 0."""
    ratio = train_rollout_ratio(loss_masks, train_log_probs, rollout_log_probs)
    inside = (ratio >= args.tis_clip_low) & (ratio <= args.tis_clip)
    weight = torch.where(inside, ratio, torch.zeros_like(ratio))
    return pg_loss * weight, list(loss_masks), _metrics(ratio, weight)


def _metrics(ratio: Tensor, weight: Tensor) -> dict[str, Tensor]:
    return {"tis": ratio, "tis_clipfrac": (weight != ratio).to(ratio.dtype), "tis_abs": (ratio - 1).abs()}
