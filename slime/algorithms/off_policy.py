"""Corrections for tokens that were sampled by an engine whose probabilities differ from those of
the trainer.

Both functions are built-in ``--custom-tis-function-path`` hooks. Such a hook is called with the
keyword arguments ``args``, ``pg_loss`` (flat, per token), ``train_log_probs``,
``rollout_log_probs``, ``loss_masks``, ``total_lengths`` and ``response_lengths`` (one entry per
sample). It returns ``(pg_loss, loss_masks, metrics)``, where metrics are flat and per token.

Sources: truncated importance sampling from Ionides (2008), for this mismatch in Yao et al., "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); IcePop from the Ring-1T
report of Ling Team, "Every Step Evolves" (2025). Off-policy sequence masking, which masks responses
with negative advantages that the policy has already moved away from: DeepSeek-AI, "DeepSeek-V3.2"
(2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .sequences import IDENTITY, Reduce, exp_ratio, flatten, keep_where, sequence_means, spread

Parts = Sequence[Tensor]
"""One tensor per sample."""
TisResult = tuple[Tensor, list[Tensor], dict[str, Tensor]]


class Bounds(Protocol):
    """The flags that the two functions read."""

    tis_clip: float
    tis_clip_low: float


def train_rollout_ratio(
    loss_masks: Parts, train_log_probs: Parts, rollout_log_probs: Parts
) -> Tensor:
    """Return exp(log π_train − log π_rollout) of each token, flat ``[R]`` and without gradient; 1
    for masked tokens. The arguments have one tensor ``[response_length]`` per sample."""
    difference = flatten(train_log_probs).detach() - flatten(rollout_log_probs).detach()
    return exp_ratio(keep_where(flatten(loss_masks), difference))


def vanilla_tis_function(
    *,
    args: Bounds,
    pg_loss: Tensor,
    loss_masks: Parts,
    train_log_probs: Parts,
    rollout_log_probs: Parts,
    **_: object,
) -> TisResult:
    """Multiply the loss by the ratio, which is clamped to [``tis_clip_low``, ``tis_clip``]."""
    ratio = train_rollout_ratio(loss_masks, train_log_probs, rollout_log_probs)
    weight = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weight, list(loss_masks), _metrics(ratio, weight)


def icepop_function(
    *,
    args: Bounds,
    pg_loss: Tensor,
    loss_masks: Parts,
    train_log_probs: Parts,
    rollout_log_probs: Parts,
    **_: object,
) -> TisResult:
    """Multiply the loss by the ratio if it is in [``tis_clip_low``, ``tis_clip``], and otherwise by
    0.
    """
    ratio = train_rollout_ratio(loss_masks, train_log_probs, rollout_log_probs)
    inside = (ratio >= args.tis_clip_low) & (ratio <= args.tis_clip)
    weight = torch.where(inside, ratio, torch.zeros_like(ratio))
    return pg_loss * weight, list(loss_masks), _metrics(ratio, weight)


def _metrics(ratio: Tensor, weight: Tensor) -> dict[str, Tensor]:
    return {
        "tis": ratio,
        "tis_clipfrac": (weight != ratio).to(ratio.dtype),
        "tis_abs": (ratio - 1).abs(),
    }


def opsm_mask(
    delta: float,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    reduce: Reduce = IDENTITY,
) -> Tensor:
    """Return 0 for tokens with A < 0 in a sequence whose masked mean of log π_old − log π_θ exceeds
    ``delta``, else 1.

    All tensors are flat ``[R]``. The result has no gradient.
    """
    difference = keep_where(mask, old_log_probs - log_probs).detach()
    # The mean is over the whole sequence: later tokens were sampled given the earlier ones, so a
    # difference at any token makes the sequence off-policy.
    kl = spread(sequence_means(difference, mask, lengths, reduce), lengths)
    return 1 - ((advantages < 0) & (kl > delta)).to(difference.dtype)


class OpsmFlags(Protocol):
    """The flag that :func:`compute_opsm_mask` reads."""

    opsm_delta: float


def compute_opsm_mask(
    args: OpsmFlags,
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    advantages: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Compute :func:`opsm_mask` with ``args.opsm_delta`` from lists with one tensor per sample,
    over whole responses.

    Returns:
        The mask and clipfrac (1 for masked tokens), both flat.
    """
    keep = opsm_mask(
        args.opsm_delta,
        flatten(full_log_probs),
        flatten(full_old_log_probs),
        flatten(advantages),
        flatten(loss_masks),
        [len(x) for x in full_log_probs],
    )
    return keep, 1 - keep
