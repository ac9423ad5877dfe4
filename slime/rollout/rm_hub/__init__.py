"""Rewards: built-in types, custom functions and reward models.

Verifiers that can hang run in killable processes (:mod:`slime.rollout.verifier`); a sample whose
verifier gave no answer is marked (``reward_timed_out``), never scored 0.
"""

from slime.rollout.rm_hub.dispatch import REWARD_TYPES, async_rm, batched_async_rm, scores_whole_groups
from slime.rollout.rm_hub.labels import check_label

__all__ = ["REWARD_TYPES", "async_rm", "batched_async_rm", "check_label", "scores_whole_groups"]
