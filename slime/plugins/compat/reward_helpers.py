r"""Helpers that compare mathematical answers, for users' reward functions.

The names of the first part are those of the MATH data set's helpers (Hendrycks et al. 2021). The
comparison is that of the reward ``math``; what only a symbolic comparison can decide runs in a
verifier process, so that it cannot hang the caller. The second part is the rule of the reward
``dapo`` (Yu et al. 2025, arXiv:2503.14476), of which ``strict_box_verify`` is the variant that
reads ``\boxed{}`` in the last 100 characters instead of ``Answer:`` in the last 300.
"""

from __future__ import annotations

import os
import re
from typing import Any

from slime.data.reasoning import answer_after_reasoning
from slime.plugins.rewards.answers import as_latex, decide, normalize_math
from slime.plugins.rewards.math import final_answer, judged, normal_answer
from slime.rollout.rm_hub.reward import last_boxed
from slime.rollout.verifier.pool import shared_pool

_EQUAL = "slime.plugins.rewards.math_equal.equal"
SECONDS = 10.0


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last complete box of a text with its command, as in ``\boxed{5}``, or None."""
    inner = last_boxed(string)
    return None if not inner else f"\\boxed{{{inner}}}"


def remove_boxed(s: str | None) -> str | None:
    r"""Return the content of ``\boxed{...}``; None if ``s`` is not a box."""
    if s is None or not s.lstrip().startswith(("\\boxed", "\\fbox")):
        return None
    return last_boxed(s) or None


def extract_boxed_answer(solution: str | None) -> str | None:
    """Return the content of the last box of a text, or None."""
    return last_boxed(solution or "") or None


extract_answer = extract_boxed_answer


def mathd_normalize_answer(answer: str | None) -> str | None:
    """Return the normal form of an answer, see
    :func:`slime.plugins.rewards.answers.normalize_math`.
    """
    return None if answer is None else normalize_math(answer)


def grade_answer_mathd(given_answer: str | None, ground_truth: str) -> bool:
    """Whether two answers have the same normal form."""
    return given_answer is not None and normalize_math(given_answer) == normalize_math(ground_truth)


def grade_answer_sympy(given_answer: str | None, ground_truth: str) -> bool:
    """Whether two answers are equal, by normal form, by value or symbolically.

    A symbolic comparison that takes more than 10 s counts as unequal.
    """
    gold = as_latex(ground_truth).strip()
    answer = as_latex(given_answer or "").strip()
    decided = decide(gold, answer)
    if decided is not None:
        return decided
    workers = max((os.cpu_count() or 2) // 2, 1)
    verdict = shared_pool(workers).submit(_EQUAL, gold, answer, timeout=SECONDS).result()
    return verdict.ok and bool(verdict.value)


def get_deepscaler_rule_based_reward(response: str | None, label: str | float | None) -> int:
    """Return 1 if the box after ``</think>`` or ``###Response`` equals the label, else 0."""
    tail = answer_after_reasoning(response)
    answer = None if tail is None else last_boxed(tail)
    if answer is None or label is None or str(label) == "":
        return 0
    return int(grade_answer_sympy(answer, last_boxed(str(label)) or str(label)))


def grade_answer_verl(solution_str: str | None, ground_truth: str) -> bool:
    """Whether the last box of a response equals the label, whose own box is removed if it has
    one.
    """
    if not ground_truth:
        return False
    answer = extract_boxed_answer(solution_str)
    gold = str(ground_truth)
    return answer is not None and grade_answer_sympy(answer, last_boxed(gold) or gold)


# --- dapo ----------------------------------------------------------------------------------------

_TAIL = 300
_BOX_TAIL = 100
_PATTERN = r"(?i)Answer\s*:\s*([^\n]+)"


def normalize_final_answer(final_answer: str) -> str:
    """Return the form in which answers and labels are compared: numbers by value, without units and
    LaTeX styles.
    """
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


def is_correct_strict_box(
    pred: str, gt: str, pause_tokens_index: list[int] | None = None
) -> tuple[int, str | None]:
    """Return 1 or -1, and the content of the last box in the last 100 characters of ``pred``, which
    must equal ``gt``.

    Args:
        pause_tokens_index: Positions of four pause tokens in the text; then the 100 characters
            before the last of them are included as well.
    """
    start = pause_tokens_index[-1] - _BOX_TAIL if pause_tokens_index else len(pred) - _BOX_TAIL
    answer = last_boxed(pred[max(start, 0) :]) or None
    return (1 if answer == gt else -1), answer


def verify(
    solution_str: str,
    answer: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
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
    """Return ``{"score": 1.0 or -1.0, "acc": bool, "pred": str or None}`` for the last 300
    characters of a response.
    """
    correct, pred = verify(
        (solution_str or "")[-_TAIL:], str(ground_truth), strict_box_verify, pause_tokens_index
    )
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
