r"""Math rewards ``math`` and ``deepscaler``: 1.0 if the final answer is mathematically equal to the label, else 0.0.

``math`` takes the last ``\boxed{}`` of the text after ``</think>`` if there is one, otherwise of the whole response;
without a box the reward is 0. With ``--math-answer any``, a response without a box is scored by the text after the last
``####`` (the mark of GSM8K), else by its last expression or number. ``deepscaler`` requires a box after the reasoning
(``</think>`` or ``###Response``).

Answers with equal normal forms and plain numbers are compared here. The others are compared by math-verify in a
verifier process, because a symbolic comparison can hang.

The second part has helpers for users' reward functions, with the names of those of the MATH data set (Hendrycks et
al. 2021). Their comparison is that of the reward ``math``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from slime.data.reasoning import after_thinking, answer_after_reasoning
from slime.data.sample import Sample
from slime.rollout.rm_hub.answers import (
    as_latex,
    as_number,
    decide,
    last_boxed,
    last_number,
    normalize_math,
)
from slime.rollout.rm_hub.outcome import verify
from slime.rollout.rm_hub.reward import Reward, missing_label
from slime.rollout.verifier.pool import shared_pool

if TYPE_CHECKING:
    from slime.config.args import Args

_EQUAL = "slime.rollout.rm_hub.math_equal.equal"
_RESPONSE_EQUAL = "slime.rollout.rm_hub.math_equal.response_equal"
_MARK = "####"
_TAIL = 4000  # characters at the end of a response without a box in which the last expression is searched


def gold_answer(label: object) -> str:
    """Return the answer in a label: its boxed or ``####`` part if it has one, otherwise the whole label."""
    text = as_latex(str(label))
    marked = _marked_answer(text)
    return (text if marked is None else marked).strip()


def _marked_answer(text: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None or _MARK not in text:
        return boxed
    after = text.rsplit(_MARK, 1)[1].strip()
    return after.split("\n", 1)[0].strip() or None


async def math_reward(args: Args, sample: Sample) -> float | None:
    """Reward type ``math``. None if the verifier gave no result."""
    response = after_thinking(sample.response)
    gold, marked = gold_answer(sample.label), last_boxed(response)
    if marked is None and args.math_answer == "boxed":
        return 0.0
    marked = _marked_answer(response) if marked is None else marked
    if marked is not None:
        return await _compare(args, sample, gold, as_latex(marked))
    tail = as_latex(response[-_TAIL:])[-_TAIL:]  # cut before the conversion, because this runs on the event loop
    gold_value, value = as_number(gold), last_number(tail)
    # Text without a number or a mathematical character can only equal the label literally.
    if value is None and not any(character in tail for character in "\\$=+*/^0123456789"):
        return float(normalize_math(gold) == normalize_math(tail))
    if gold_value is not None and gold_value == value and "\\" not in tail and "$" not in tail:
        return 1.0
    return _as_reward(await verify(args, sample, _RESPONSE_EQUAL, gold, tail))


async def deepscaler_reward(args: Args, sample: Sample) -> float | None:
    """Reward type ``deepscaler``. None if the verifier gave no result."""
    tail = answer_after_reasoning(sample.response)
    boxed = None if tail is None else last_boxed(tail)
    return 0.0 if boxed is None else await _compare(args, sample, gold_answer(sample.label), as_latex(boxed))


async def _compare(args: Args, sample: Sample, gold: str, answer: str) -> float | None:
    decided = decide(gold, answer)
    if decided is not None:
        return float(decided)
    return _as_reward(await verify(args, sample, _EQUAL, gold, answer))


def _as_reward(value: bool | None) -> float | None:
    return None if value is None else float(value)


def _label_problem(label: object, _: Mapping[str, object]) -> str | None:
    missing = missing_label(label)
    if missing:
        return missing
    gold = gold_answer(label)
    if not normalize_math(gold):
        return f"label {str(label)[:80]!r} contains nothing but spaces and signs"
    braces = re.sub(r"\\.", "", gold, flags=re.DOTALL)
    if braces.count("{") != braces.count("}"):
        return f"label {gold[:80]!r} has unbalanced braces"
    prose = re.sub(r"\\[A-Za-z]+", " ", gold)
    if not re.search(r"[\d=^_+*/<>\\]", gold) and len(re.findall(r"[A-Za-z]{2,}", prose)) > 4:
        return f"label {gold[:80]!r} reads like a sentence, not a mathematical answer (type f1 compares texts)"
    return None


def _own_answer(label: object, _: Sample) -> str:
    return f"\\boxed{{{gold_answer(label)}}}"


MATH = Reward(
    math_reward,
    label_problem=_label_problem,
    needs_label=True,
    own_answer=_own_answer,
    boxed=lambda boxed, response: f"\\boxed{{{boxed}}}",
)
DEEPSCALER = Reward(
    deepscaler_reward,
    label_problem=_label_problem,
    needs_label=True,
    needs_reasoning=True,
    own_answer=_own_answer,
    boxed=lambda boxed, response: response,
)


__all__ = [
    "extract_answer", "extract_boxed_answer", "grade_answer_mathd", "grade_answer_sympy", "grade_answer_verl",
    "last_boxed_only_string", "mathd_normalize_answer", "remove_boxed",
]  # fmt: skip

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


def extract_answer(passage: str | None) -> str | None:
    """Return the content of the last box of a text, or None."""
    return extract_boxed_answer(passage)


def mathd_normalize_answer(answer: str | None) -> str | None:
    """Return the normal form of an answer, see :func:`slime.rollout.rm_hub.answers.normalize_math`."""
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


def get_deepscaler_rule_based_reward(response: str | None, label: str | float | None) -> int:
    """Return 1 if the box after ``</think>`` or ``###Response`` equals the label, else 0."""
    tail = answer_after_reasoning(response)
    answer = None if tail is None else last_boxed(tail)
    if answer is None or label is None or str(label) == "":
        return 0
    gold = last_boxed(str(label))
    return int(grade_answer_sympy(answer, str(label) if gold is None else gold))


def grade_answer_verl(solution_str: str | None, ground_truth: str) -> bool:
    """Whether the last box of a response equals the label, whose own box is removed if it has one."""
    if not ground_truth:
        return False
    answer, gold = extract_boxed_answer(solution_str), last_boxed(str(ground_truth))
    return answer is not None and grade_answer_sympy(answer, str(ground_truth) if gold is None else gold)
