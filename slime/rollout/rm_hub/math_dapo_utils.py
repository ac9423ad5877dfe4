r"""Reward ``dapo``: the last ``Answer: ...`` in the last 300 characters, compared with the label.

The reward is ``{"score": 1.0 or -1.0, "acc": bool, "pred": str}``. Train with ``--reward-key score``.
Source: the rule-based reward of DAPO (Yu et al. 2025, arXiv:2503.14476), section 4. ``strict_box_verify`` is its
variant that reads ``\boxed{}`` in the last 100 characters.

The functions in ``__all__`` are for users' reward functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slime.data.reasoning import after_thinking
from slime.data.sample import Sample
from slime.rollout.rm_hub.answers import as_latex, last_boxed, normalize_math, same_answer, value_of
from slime.rollout.rm_hub.math_utils import last_boxed_only_string, remove_boxed
from slime.rollout.rm_hub.reward import Reward, missing_label

_TAIL = 300
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
NO_ANSWER = "[INVALID]"


def dapo_reward(sample: Sample) -> dict[str, Any]:
    """Score one sample."""
    found = final_answer(after_thinking(sample.response)[-_TAIL:])
    correct, pred = judged(found, str(sample.label))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def judged(found: str | None, label: str) -> tuple[bool, str]:
    """Return whether an answer equals the label without a symbolic comparison, and its normal form."""
    if found is None:
        return False, NO_ANSWER
    return same_answer(_plain(label), _plain(found)) is True, normal_answer(found)


def final_answer(text: str) -> str | None:
    """Return the line that follows the last ``Answer:``, which may be the next one, or None."""
    found = _ANSWER.findall(text)
    return found[-1] if found else None


def normal_answer(text: str) -> str:
    """Return the normal form of an answer: a number by its value, without its unit, and all else as normalized text."""
    text = _plain(text)
    value = value_of(text)
    if value is None:
        return normalize_math(text)
    return str(value.numerator) if value.denominator == 1 else str(value)


def _plain(text: str) -> str:
    text = text.strip().strip("*").strip()
    boxed = last_boxed(text)
    text = text if boxed is None else boxed
    text = text.strip().strip("*").removesuffix(".").strip()
    return as_latex(text[2:-2] if text.startswith("\\(") and text.endswith("\\)") else text)


def _label_problem(label: object, _: Mapping[str, object]) -> str | None:
    missing = missing_label(label)
    return missing or (None if "\n" not in str(label).strip() else f"label {str(label)[:80]!r} has more than one line")


DAPO = Reward(
    dapo_reward,
    label_problem=_label_problem,
    needs_label=True,
    own_answer=lambda label, sample: f"Answer: {label}",
    boxed=lambda boxed, response: f"Answer: {boxed}",
)


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
