"""Dr. GRPO: no division by the group's standard deviation and none by the response's length.

``--advantage-estimator dr_grpo`` centres rewards (:func:`.baselines.centred`) and reduces with a constant
divisor: ``dr_grpo_divisor`` (``--custom-config-path``), else ``--rollout-max-response-len``. The reducer
alone, for another estimator:
``--custom-pg-loss-reducer-function-path slime.algorithms.dr_grpo.pg_loss_reducer``.

Source: Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective" (2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .reductions import Reducer, constant_reducer
from .sequences import flatten


def pg_loss_reducer(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool,
    *,
    args: Any,
) -> Reducer:
    """Σ over the micro-batch of m·x / divisor."""
    divisor = getattr(args, "dr_grpo_divisor", None) or args.rollout_max_response_len
    return constant_reducer(flatten(loss_masks), float(divisor))
