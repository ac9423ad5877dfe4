"""GRPO, and every estimator whose tokens all have their response's reward, less a group baseline, as advantage.

The baseline (:mod:`.baselines`, :mod:`.rloo`) is subtracted where whole groups are at hand, when rewards
are post-processed; here the result is spread over the tokens. ``--kl-coef`` has no effect on these.

Source: Shao et al., "DeepSeekMath" (2024), outcome supervision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def get_grpo_returns(rewards: Sequence[float] | Tensor, kl: Sequence[Tensor]) -> list[Tensor]:
    """R_i for every token: tensors with the shapes of ``kl`` (one per sample)."""
    return [torch.full_like(k, float(reward)) for reward, k in zip(rewards, kl, strict=True)]


def compute(args: Any, batch: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Advantages and returns are the same."""
    returns = get_grpo_returns(batch["rewards"], batch["kl"])
    return returns, [x.clone() for x in returns]
