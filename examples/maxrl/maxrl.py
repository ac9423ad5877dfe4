"""MaxRL as a user's own estimator: --advantage-estimator examples/maxrl/maxrl.py:MaxRL

Source: "Maximum Likelihood Reinforcement Learning", arXiv 2602.02710.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime.algorithms.baselines import centred
from slime.algorithms.grpo import Grpo


class MaxRL(Grpo):
    """GRPO whose group baseline divides by the mean reward instead of the deviation. The rest is
    GRPO.
    """

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        """(r_i − mean) / mean, and 0 where the mean is not above 0: a group without a success says
        nothing.

        With rewards of 0 and 1 the mean is the share of solved samples, p. A success in a group
        with p = 1/8 gets 7, one in a group with p = 7/8 gets 1/7: prompts that are rarely solved
        count more than with GRPO.
        """
        mean = sum(rewards) / len(rewards)
        # centred() gives exactly 0 for equal rewards, so that the training step can leave the group
        # out.
        return [difference / mean if mean > 0 else 0.0 for difference in centred(rewards)]
