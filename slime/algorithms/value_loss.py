"""The critic's clipped regression loss.

Source: the value clipping of OpenAI's baselines, as analyzed in Engstrom et al., "Implementation
Matters in Deep Policy Gradients" (2020).
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> tuple[Tensor, Tensor]:
    """Compute max((V − ret)², (V_old + clip(V − V_old, ±value_clip) − ret)²) per token, without a factor ½.

    Returns:
        The loss and clipfrac (1 where the clipped term is larger), both with the shape of ``values``.
    """
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    plain_error = (values - returns).square()
    clipped_error = (clipped - returns).square()
    return torch.maximum(plain_error, clipped_error), (clipped_error > plain_error).to(values.dtype)
