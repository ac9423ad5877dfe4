"""GDPO: each of several rewards is normalised within its group before they are summed, so that none
is lost in the spread of another.

Source: arXiv 2601.05242.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar

from slime.algorithms.algorithm import Row, Scored
from slime.algorithms.baselines import STD_EPSILON, centred, standardized
from slime.algorithms.grpo import Grpo


def decoupled_advantages(
    groups: Sequence[Hashable],
    parts: Sequence[Mapping[str, float]],
    weights: Mapping[str, float] | None,
    std_normalization: bool = True,
) -> list[float]:
    """Return Σ_k w_k (r_ik − mean_k) / (std_k + 1e-6) over each group, divided by its deviation
    over the batch.

    A rollout without a reward k is left out of the statistics of k. Deviations are those over n −
    1. The mean over the batch is 0 whatever the rewards, because each group sums to 0, so it is not
    subtracted.

    Args:
        groups: The group of each rollout.
        parts: The rewards of each rollout by name.
        weights: By name; a reward that is not named has 0. None: 1 for each.
        std_normalization: False omits the division by std_k.

    Source: arXiv 2601.05242, the decoupled normalization and the normalization over the batch.
    """
    sums = [0.0] * len(groups)
    for name in sorted({name for one in parts for name in one}):
        weight = 1.0 if weights is None else weights.get(name, 0.0)
        members: dict[Hashable, list[int]] = {}
        for i, one in enumerate(parts):
            if name in one:
                members.setdefault(groups[i], []).append(i)
        for positions in members.values():
            rewards = [parts[i][name] for i in positions]
            values = standardized(rewards) if std_normalization else centred(rewards)
            for i, value in zip(positions, values, strict=True):
                sums[i] += weight * value
    if len(sums) < 2:
        return sums
    std = math.sqrt(math.fsum(x * x for x in sums) / (len(sums) - 1))
    return [x / (std + STD_EPSILON) for x in sums]


class Gdpo(Grpo):
    """GRPO for several rewards of a sample. With one reward, it is GRPO whose advantages have the
    deviation 1 over the batch.
    """

    forbids: ClassVar[Mapping[str, str]] = {
        "overlong_buffer_len": "the penalty is added to the sum of the rewards; return it as one of them",
    }
    row = Row(
        "Σ_k w_k·(r_k − mean_k) / (std_k + 1e-6) of the group, divided by its std over the batch",
        "clipped ρ",
        "`--reward-weights`; several [rewards](rewards.md#several-rewards)",
        "arXiv 2601.05242",
    )

    def batch_baseline(self, rollouts: Sequence[Scored]) -> Sequence[float]:
        named = any(one.parts for one in rollouts)
        parts = [one.parts if named else {"reward": one.reward} for one in rollouts]
        weights = self.settings.reward_weights if named else None
        groups = [one.group for one in rollouts]
        return decoupled_advantages(groups, parts, weights, self.settings.std_normalization)
