"""From a per-token tensor to this micro-batch's share of the step's scalar.

A reducer gives a plain sum over rollouts or tokens; dividing it by the number of rollouts (or
tokens) of the whole optimizer step makes a share, and the shares of all micro-batches and ranks add
up to the step's value. So the value does not depend on how samples are packed and split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from .sequences import keep_where, spread

if TYPE_CHECKING:
    from torch import Tensor

Reducer: TypeAlias = "Callable[[Tensor], Tensor]"
"""Per-token ``[R]`` → scalar. Values of masked tokens do not count, not even nan."""


def rollout_mean_reducer(mask: Tensor, rollout_mask_sums: Tensor, lengths: Sequence[int]) -> Reducer:
    """Σ_i Σ_t m·x / max(mask sum of the whole rollout, 1): the sum over rollouts of each one's token mean.

    Args:
        mask: ``[R]``; tokens rejected later are 0 here, while the divisor keeps counting them.
        rollout_mask_sums: ``[n]``, per sample: mask sum over all samples of its rollout (fan-out siblings).
    """
    # The divisor is that of the whole rollout. A rollout that fanned out into several samples weighs as much as one
    # that did not.
    divisor = spread(rollout_mask_sums.clamp(min=1), lengths)
    return lambda x: (keep_where(mask, x) * mask.to(x.dtype) / divisor.to(x.dtype)).sum()


def token_sum_reducer(mask: Tensor) -> Reducer:
    """Σ m·x, for ``--calculate-per-token-loss``."""
    return lambda x: (keep_where(mask, x) * mask.to(x.dtype)).sum()


def constant_reducer(mask: Tensor, divisor: float) -> Reducer:
    """Σ m·x / divisor, the same divisor for every response."""
    return lambda x: (keep_where(mask, x) * mask.to(x.dtype)).sum() / divisor
