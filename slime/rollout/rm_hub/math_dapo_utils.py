r"""Documented import path of the rule of the reward ``dapo``, for users' reward functions.

Source: the rule-based reward of DAPO (Yu et al. 2025, arXiv:2503.14476). ``strict_box_verify`` is its variant that
reads ``\boxed{}`` in the last 100 characters instead of ``Answer:`` in the last 300.
"""

from __future__ import annotations

import re
from typing import Any

from slime.rollout.rm_hub.dapo import final_answer, judged, normal_answer
from slime.rollout.rm_hub.math_utils import last_boxed_only_string, remove_boxed
from slime.rollout.rm_hub.text import last_boxed

__all__ = [
    "compute_score", "is_correct_minerva", "is_correct_strict_box", "last_boxed_only_string", "normalize_final_answer",
    "remove_boxed", "verify",
]  # fmt: skip

_TAIL, _BOX_TAIL = 300, 100
_PATTERN = r"(?i)Answer\s*:\s*([^\n]+)"


def normalize_final_answer(final_answer: str) -> str:
    """Return the form in which answers and labels are compared: numbers by value, without units and LaTeX styles."""
    return normal_answer(final_answer)


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = _PATTERN
) -> tuple[bool, str]:
    """Compare the last match of ``answer_pattern`` in a response with a label.

    Args:
        gt_need_extract: Whether the label is a solution whose box has the answer.

    Returns:
        Whether they are equal, and the normal form of the answer (``[INVALID]`` if there is none).
    """
    if answer_pattern == _PATTERN:
        found = final_answer(solution_str)
    else:
        matches = re.findall(answer_pattern, solution_str)
        found = matches[-1] if matches else None
    gold = last_boxed(gt) if gt_need_extract else None
    return judged(found, str(gt) if gold is None else gold)


def is_correct_strict_box(pred: str, gt: str, pause_tokens_index: list[int] | None = None) -> tuple[int, str | None]:
    """Return 1 or -1, and the content of the last box in the last 100 characters of ``pred``, which must equal ``gt``.

    Args:
        pause_tokens_index: Positions of four pause tokens in the text; then the 100 characters before the last of them
            are included as well.
    """
    start = pause_tokens_index[-1] - _BOX_TAIL if pause_tokens_index else len(pred) - _BOX_TAIL
    answer = last_boxed(pred[max(start, 0) :]) or None
    return (1 if answer == gt else -1), answer


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> tuple[bool, str | None]:
    """Return whether a response is correct, and its answer."""
    if strict_box_verify:
        score, found = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return score == 1, found
    return is_correct_minerva(solution_str, answer)


def compute_score(
    solution_str: str | None,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """Return ``{"score": 1.0 or -1.0, "acc": bool, "pred": str or None}`` for the last 300 characters of a response."""
    correct, pred = verify((solution_str or "")[-_TAIL:], str(ground_truth), strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
