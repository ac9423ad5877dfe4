"""Off-policy sequence masking: mask responses with negative advantages that the policy has already moved away from.

Source: DeepSeek-AI, "DeepSeek-V3.2" (2025), section "Off-Policy Sequence Masking".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .reduce import Reduce
from .sequences import IDENTITY, flatten, keep_where, sequence_means, spread


def opsm_mask(
    delta: float,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    reduce: Reduce = IDENTITY,
) -> Tensor:
    """Return 0 for tokens with A < 0 in a sequence whose masked mean of log π_old − log π_θ exceeds ``delta``, else 1.

    All tensors are flat ``[R]``. The result has no gradient.
    """
    difference = keep_where(mask, old_log_probs - log_probs).detach()
    # The mean is over the whole sequence: later tokens were sampled given the earlier ones, so a difference at any
    # token makes the sequence off-policy.
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
    """Compute :func:`opsm_mask` with ``args.opsm_delta`` from lists with one tensor per sample, over whole responses.

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
