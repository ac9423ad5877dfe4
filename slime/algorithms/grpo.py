"""GRPO: the advantage of every token is the reward minus the mean of its group, divided by the
standard deviation.

Source: Shao et al., "DeepSeekMath" (2024), outcome supervision. RLOO differs in the baseline only;
its source is Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization" (2024), eq.
8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .algorithm import Algorithm, Entries, Row
from .baselines import centred, standardized

if TYPE_CHECKING:
    from torch import Tensor


def get_grpo_returns(rewards: Sequence[float] | Tensor, kl: Sequence[Tensor]) -> list[Tensor]:
    """Return R_i for every token of sample i, as tensors with the shapes of ``kl``."""
    return [k.new_full(k.shape, float(reward)) for reward, k in zip(rewards, kl, strict=True)]


class Grpo(Algorithm):
    """GRPO. ``--kl-coef`` has no effect on it, nor on estimators that inherit its advantages."""

    row = Row(
        "(r − mean) / (std + 1e-6) of the group, std over n − 1",
        "clipped ρ of the token",
        "`--disable-grpo-std-normalization` omits the division by the std",
        "Shao et al. 2024, DeepSeekMath",
    )

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        return standardized(rewards) if self.settings.std_normalization else centred(rewards)

    def advantages(self, batch: Entries) -> tuple[list[Tensor], list[Tensor]]:
        """Return advantages and returns, which are equal."""
        returns = get_grpo_returns(batch["rewards"], batch["kl"])
        return returns, [x.clone() for x in returns]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return r_i − Σ_{j≠i} r_j / (n − 1) = n / (n − 1) · (r_i − mean), or 0 for a group of one."""
    n = len(rewards)
    return [d * n / (n - 1) for d in centred(rewards)] if n > 1 else [0.0] * n


class Rloo(Grpo):
    """GRPO with the leave-one-out baseline."""

    row = Row("r − mean of the other samples of the group", "clipped ρ", "", "Ahmadian et al. 2024")

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        return leave_one_out(rewards)
