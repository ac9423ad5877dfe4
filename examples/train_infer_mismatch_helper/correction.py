"""A correction of one's own, for ``--custom-tis-function-path``: leave out what engine and trainer
read differently.

The trainer scores every sampled token again. Where its log-prob differs from the engine's (another
dtype, other kernels, older weights), the sample was not drawn from the policy that is trained. This
function leaves out whole answers whose mean gap is too large, and weighs the rest by the ratio of
the two probabilities, truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MAX_GAP = 0.05  # nats per token; ``sequence_gap_limit`` in the YAML file of --custom-config-path
MAX_WEIGHT = 2.0  # ``sequence_weight_limit``


def sequence_gate(
    *,
    args: Any,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Called by the policy loss of each micro-batch.

    Args:
        pg_loss: float [R], of the R response tokens of all samples, one after the other.
        train_log_probs, rollout_log_probs, loss_masks: one tensor [response length] per sample.

    Returns:
        The weighted loss [R]; the masks, 0 for samples that are left out; metrics, one number per
        token.
    """
    limit = float(getattr(args, "sequence_gap_limit", MAX_GAP))
    heaviest = float(getattr(args, "sequence_weight_limit", MAX_WEIGHT))
    weights, masks, gaps = [], [], []
    for ours, engines, mask in zip(train_log_probs, rollout_log_probs, loss_masks, strict=True):
        trained = mask.bool()
        # 0 where nothing is trained
        difference = torch.where(trained, ours.detach() - engines, torch.zeros_like(ours))
        gap = difference.abs().sum() / trained.sum().clamp(min=1)
        weights.append(difference.exp().clamp(max=heaviest))
        masks.append(mask if gap <= limit else torch.zeros_like(mask))
        gaps.append(gap.expand(len(mask)))
    dropped = torch.cat([old - new for old, new in zip(loss_masks, masks, strict=True)]).to(
        pg_loss.dtype
    )
    metrics = {
        "gate_gap": torch.cat(gaps),
        "gate_dropped_frac": dropped,
        "gate_weight": torch.cat(weights),
    }
    return pg_loss * torch.cat(weights), masks, metrics
