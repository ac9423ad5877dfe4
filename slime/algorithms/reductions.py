"""Reduce a per-token tensor to the part of a micro-batch in the scalar of an optimizer step.

A reducer returns a plain sum over rollouts or tokens. Divided by the number of rollouts or tokens in the whole
optimizer step, it is the part of the micro-batch. The parts of all micro-batches and ranks add up to the value of the
step, which so does not depend on how samples are packed and divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from .sequences import keep_where, spread

if TYPE_CHECKING:
    from torch import Tensor

Reducer: TypeAlias = "Callable[[Tensor], Tensor]"
"""Reduces a per-token tensor ``[R]`` to a scalar. Masked tokens are ignored, even if their values are NaN."""


def rollout_mean_reducer(mask: Tensor, rollout_mask_sums: Tensor, lengths: Sequence[int]) -> Reducer:
    """Return a reducer that computes the sum over rollouts of the mean over the tokens of each rollout.

    The formula is Σ_i Σ_t m·x / max(mask sum of the whole rollout, 1).

    Args:
        mask: ``[R]``. Rejected tokens are 0 here, but the divisor still counts them.
        rollout_mask_sums: ``[n]``, for each sample the mask sum over all samples of its rollout.
    """
    # The divisor is that of the whole rollout, so that a rollout with several samples has the same weight as a rollout
    # with one.
    divisor = spread(rollout_mask_sums.clamp(min=1), lengths)
    return lambda x: (keep_where(mask, x) * mask.to(x.dtype) / divisor.to(x.dtype)).sum()


def token_sum_reducer(mask: Tensor) -> Reducer:
    """Return a reducer that computes Σ m·x, a scalar, for ``--calculate-per-token-loss``. The mask is ``[R]``, like
    x."""
    return lambda x: (keep_where(mask, x) * mask.to(x.dtype)).sum()


def constant_reducer(mask: Tensor, divisor: float) -> Reducer:
    """Return a reducer that computes Σ m·x / divisor, a scalar, with the same divisor for every response. The mask is
    ``[R]``, like x."""
    return lambda x: (keep_where(mask, x) * mask.to(x.dtype)).sum() / divisor
