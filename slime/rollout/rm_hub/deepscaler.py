"""Documented import path of the rule of the reward ``deepscaler``, for users' reward functions."""

from __future__ import annotations

from slime.data.reasoning import answer_after_reasoning
from slime.rollout.rm_hub.math_utils import grade_answer_sympy
from slime.rollout.rm_hub.text import last_boxed

__all__ = ["get_deepscaler_rule_based_reward"]


def get_deepscaler_rule_based_reward(response: str | None, label: str | float | None) -> int:
    """Return 1 if the box after ``</think>`` or ``###Response`` equals the label, else 0."""
    tail = answer_after_reasoning(response)
    answer = None if tail is None else last_boxed(tail)
    if answer is None or label is None or str(label) == "":
        return 0
    gold = last_boxed(str(label))
    return int(grade_answer_sympy(answer, str(label) if gold is None else gold))
