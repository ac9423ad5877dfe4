"""Rewards: built-in types, custom functions and reward models.

Verifiers that can hang run in killable processes (:mod:`slime.rollout.verifier`). A sample whose verifier gave no
result is marked (``reward_timed_out``); it never gets the reward 0 for that.
"""

from slime.rollout.rm_hub.dispatch import REWARD_TYPES, async_rm, batched_async_rm, scores_whole_groups
from slime.rollout.rm_hub.labels import check_label

__all__ = ["REWARD_TYPES", "async_rm", "batched_async_rm", "check_label", "scores_whole_groups"]
