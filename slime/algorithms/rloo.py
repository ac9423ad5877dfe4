"""RLOO: each response's reward minus the mean reward of the other responses to the same prompt.

Needs whole groups, so it runs where rewards are post-processed:
``--advantage-estimator grpo --custom-reward-post-process-path slime.algorithms.rloo.post_process_rewards``.

Source: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization" (2024), eq. 8.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any


def leave_one_out(rewards: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """r_i − mean of the group's other rewards; 0 for a group of one, which has no baseline."""
    total: dict[Hashable, float] = defaultdict(float)
    count: dict[Hashable, int] = defaultdict(int)
    for reward, group in zip(rewards, groups, strict=True):
        total[group] += reward
        count[group] += 1
    return [
        reward - (total[group] - reward) / (count[group] - 1) if count[group] > 1 else 0.0
        for reward, group in zip(rewards, groups, strict=True)
    ]


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """A ``--custom-reward-post-process-path`` hook: raw rewards and leave-one-out rewards, grouped by
    ``group_index``."""
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    return raw, leave_one_out(raw, [sample.group_index for sample in samples])
