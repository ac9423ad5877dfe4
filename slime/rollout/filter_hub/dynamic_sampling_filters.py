"""Filters for DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476, section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.data.sample import Group, flatten
from slime.rollout.filter_hub.base_types import DynamicFilterOutput

if TYPE_CHECKING:
    from slime.config.args import Args


def check_reward_nonzero_std(args: Args, samples: Group, **kwargs: object) -> DynamicFilterOutput:
    """Keep a group if its rewards differ. If they are all equal, all advantages are 0, so nothing
    can be learned.
    """
    rewards = [
        float(sample.get_reward_value(args))
        for sample in flatten(samples)
        if not sample.reward_timed_out
    ]
    if len(set(rewards)) > 1:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(
        keep=False, reason=f"zero_std_{round(rewards[0], 1)}" if rewards else "no_rewards"
    )


def check_reward_nonzero_std_with_fallback(
    args: Args, samples: Group, **kwargs: object
) -> DynamicFilterOutput:
    """Like :func:`check_reward_nonzero_std`, but keep a group with equal rewards if the rollout
    would lack groups.
    """
    answer = check_reward_nonzero_std(args, samples)
    return DynamicFilterOutput(answer.keep, answer.reason, keep_when_insufficient=not answer.keep)
