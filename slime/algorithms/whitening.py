"""Whiten advantages over all unmasked tokens of the whole batch, on all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .reduce import Reduce
from .sequences import flatten, keep_where

EPSILON = 1e-8


def normalize_advantages(advantages: Sequence[Tensor], loss_masks: Sequence[Tensor], reduce: Reduce) -> list[Tensor]:
    """Compute (A − μ) · rsqrt(σ² + 1e-8), with the masked mean and the Bessel-corrected masked variance.

    The sums are computed in float64 and in two passes, so that the result hardly depends on how samples are divided
    among ranks. This is a collective operation: a rank without samples must call it too. With fewer than two unmasked
    tokens there is no variance, and only the mean is subtracted.

    Args:
        advantages, loss_masks: ``[response_length]`` per sample.
        reduce: Its ``over_data`` must count every token once.
    """
    mask = flatten(loss_masks).double()
    x = keep_where(mask, flatten(advantages).double())
    total, count = reduce.over_data(torch.stack([(x * mask).sum(), mask.sum()])).unbind()
    # There are two passes, because one pass, with the difference of two large sums of squares, would lose the variance
    # of almost equal advantages.
    mean = total / count.clamp(min=1)
    squares = reduce.over_data(((x - mean).square() * mask).sum())
    variance = squares / (count - 1).clamp(min=1)
    scale = torch.where(count > 1, torch.rsqrt(variance + EPSILON), torch.ones_like(variance))
    return [((a.double() - mean) * scale).to(a.dtype) for a in advantages]
