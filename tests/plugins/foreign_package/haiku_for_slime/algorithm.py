"""An estimator with a flag of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime.algorithms.grpo import Grpo
from slime.config.flag import flag


@dataclass
class ShareFlags:
    _title = "estimator share"

    baseline_share: float = flag(
        1.0, low=0, high=1, help="Part of the group's mean that is subtracted"
    )


class Share(Grpo):
    """GRPO that subtracts only a part of the mean."""

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        own = self.settings.own
        assert isinstance(own, ShareFlags)
        mean = sum(rewards) / len(rewards)
        return [reward - own.baseline_share * mean for reward in rewards]
