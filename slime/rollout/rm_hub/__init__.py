"""Rewards: built-in types, custom functions and reward models.

Verifiers that can hang run in killable processes (:mod:`slime.rollout.verifier`). A sample whose
verifier gave no result is marked (``reward_timed_out``); it never gets the reward 0 for that.

Users' functions import names from here. A name is imported when it is first asked for, because some
are plug-ins'.
"""

import importlib
from typing import Any

_NAMES = {
    "Reward": "reward.Reward",
    "async_rm": "dispatch.async_rm",
    "batched_async_rm": "dispatch.batched_async_rm",
    "check_label": "reward.check_label",
    "compute_gpqa_reward": "gpqa.compute_gpqa_reward",
    "compute_score_dapo": "math_dapo_utils.compute_score",
    "extract_answer": "math_utils.extract_answer",
    "extract_boxed_answer": "math_utils.extract_boxed_answer",
    "f1_score": "f1.f1_score",
    "get_deepscaler_rule_based_reward": "deepscaler.get_deepscaler_rule_based_reward",
    "grade_answer_verl": "math_utils.grade_answer_verl",
    "scores_whole_groups": "dispatch.scores_whole_groups",
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _NAMES[name].partition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


def __dir__() -> list[str]:
    return [*globals(), *_NAMES]
