"""RLOO: the advantage is the reward of a response minus the mean reward of the other responses to the same prompt.

Source: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization" (2024), eq. 8.
"""

from __future__ import annotations

from collections.abc import Sequence

from .algorithm import Row
from .baselines import centred
from .grpo import Grpo


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return r_i − Σ_{j≠i} r_j / (n − 1) = n / (n − 1) · (r_i − mean), or 0 for a group of one."""
    n = len(rewards)
    return [d * n / (n - 1) for d in centred(rewards)] if n > 1 else [0.0] * n


class Rloo(Grpo):
    """GRPO with the leave-one-out baseline."""

    row = Row("r − mean of the other samples of the group", "clipped ρ", "", "Ahmadian et al. 2024")

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        return leave_one_out(rewards)
