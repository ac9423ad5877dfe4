r"""Documented import path of helpers that compare mathematical answers, for users' reward functions.

The names are those of the MATH data set's helpers (Hendrycks et al. 2021). The comparison is that of the reward
``math``; what only a symbolic comparison can decide runs in a verifier process, so that it cannot hang the caller.
"""

from __future__ import annotations

import os

from slime.rollout.rm_hub.answers import decide
from slime.rollout.rm_hub.text import as_latex, last_boxed, normalize_math
from slime.rollout.verifier.pool import shared_pool

__all__ = [
    "extract_answer", "extract_boxed_answer", "grade_answer_mathd", "grade_answer_sympy", "grade_answer_verl",
    "last_boxed_only_string", "mathd_normalize_answer", "remove_boxed",
]  # fmt: skip

SECONDS = 10.0
_EQUAL = "slime.rollout.rm_hub.math_equal.equal"


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


def extract_answer(passage: str | None) -> str | None:
    """Return the content of the last box of a text, or None."""
    return extract_boxed_answer(passage)


def mathd_normalize_answer(answer: str | None) -> str | None:
    """Return the normal form of an answer, see :func:`slime.rollout.rm_hub.text.normalize_math`."""
    return None if answer is None else normalize_math(answer)


def grade_answer_mathd(given_answer: str | None, ground_truth: str) -> bool:
    """Whether two answers have the same normal form."""
    return given_answer is not None and normalize_math(given_answer) == normalize_math(ground_truth)


def grade_answer_sympy(given_answer: str | None, ground_truth: str) -> bool:
    """Whether two answers are equal, by normal form, by value or symbolically.

    A symbolic comparison that takes more than 10 s counts as unequal.
    """
    gold, answer = as_latex(ground_truth).strip(), as_latex(given_answer or "").strip()
    decided = decide(gold, answer)
    if decided is not None:
        return decided
    workers = max((os.cpu_count() or 2) // 2, 1)
    verdict = shared_pool(workers).submit(_EQUAL, gold, answer, timeout=SECONDS).result()
    return verdict.ok and bool(verdict.value)


def grade_answer_verl(solution_str: str | None, ground_truth: str) -> bool:
    """Whether the last box of a response equals the label, whose own box is removed if it has one."""
    if not ground_truth:
        return False
    answer, gold = extract_boxed_answer(solution_str), last_boxed(str(ground_truth))
    return answer is not None and grade_answer_sympy(answer, str(ground_truth) if gold is None else gold)
