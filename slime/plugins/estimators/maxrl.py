"""MaxRL: the reward relative to the mean of its group, so that prompts that are rarely solved count
more.

Source: arXiv 2602.02710.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slime.algorithms.algorithm import Row
from slime.algorithms.baselines import centred
from slime.algorithms.grpo import Grpo

SMALLEST_MEAN = 1e-6
"""A mean of rewards below this counts as 0: it can be the rounding of a sum of rewards that
cancel.
"""


def relative_to_mean(rewards: Sequence[float]) -> list[float]:
    """Return (r_i − mean) / mean, and 0 where the mean is not above 0: a group without a success
    says nothing.

    With rewards of 0 and 1 the mean is the share of solved samples, p. A success gets 1/p − 1, and
    the group's gradient is that of log p instead of p.

    Source: arXiv 2602.02710, the estimator with as many terms as samples. Equal rewards give
    exactly 0.
    """
    mean = math.fsum(rewards) / len(rewards)
    if mean < SMALLEST_MEAN:
        return [0.0] * len(rewards)
    return [difference / mean for difference in centred(rewards)]


class MaxRl(Grpo):
    """GRPO that divides by the mean of the group instead of the deviation."""

    row = Row(
        "(r − mean) / mean of the group, 0 where the mean is not above 0",
        "clipped ρ",
        "",
        "arXiv 2602.02710",
    )

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        return relative_to_mean(rewards)
