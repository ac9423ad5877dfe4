"""Rewards: built-in types, custom functions and reward models.

Verifiers that can hang run in killable processes (:mod:`slime.rollout.verifier`). A sample whose verifier gave no
result is marked (``reward_timed_out``); it never gets the reward 0 for that.
"""

from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.dispatch import async_rm, batched_async_rm, scores_whole_groups
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score as compute_score_dapo
from slime.rollout.rm_hub.math_utils import extract_answer, extract_boxed_answer, grade_answer_verl
from slime.rollout.rm_hub.reward import Reward, check_label

__all__ = [
    "Reward", "async_rm", "batched_async_rm", "check_label", "compute_gpqa_reward", "compute_score_dapo",
    "extract_answer", "extract_boxed_answer", "f1_score", "get_deepscaler_rule_based_reward", "grade_answer_verl",
    "scores_whole_groups",
]  # fmt: skip
