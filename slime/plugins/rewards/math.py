r"""Math rewards ``math`` and ``deepscaler``: 1.0 if the final answer is mathematically equal to the
label, else 0.0.

``math`` takes the last ``\boxed{}`` of the text after ``</think>`` if there is one, otherwise of
the whole response; without a box the reward is 0. With ``--math-answer any``, a response without a
box is scored by the text after the last ``####`` (the mark of GSM8K), else by its last expression
or number. ``deepscaler`` requires a box after the reasoning (``</think>`` or ``###Response``).

Answers with equal normal forms and plain numbers are compared here. The others are compared by
math-verify in a verifier process, because a symbolic comparison can hang.

``dapo`` compares the last ``Answer: ...`` in the last 300 characters with the label, never
symbolically. Its reward is ``{"score": 1.0 or -1.0, "acc": bool, "pred": str}``. Train with
``--reward-key score``.
Source: the rule-based reward of DAPO (Yu et al. 2025, arXiv:2503.14476), section 4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime.data.reasoning import after_thinking, answer_after_reasoning
from slime.data.sample import Sample
from slime.plugins.rewards.answers import (
    as_latex,
    as_number,
    decide,
    last_number,
    normalize_math,
    same_answer,
    value_of,
)
from slime.rollout.rm_hub.outcome import verify
from slime.rollout.rm_hub.reward import Reward, last_boxed, missing_label

if TYPE_CHECKING:
    from slime.config.data import RewardConfig

_EQUAL = "slime.plugins.rewards.math_equal.equal"
_RESPONSE_EQUAL = "slime.plugins.rewards.math_equal.response_equal"
_MARK = "####"
# characters at the end of a response without a box in which the last expression is searched
_TAIL = 4000


def gold_answer(label: object) -> str:
    """Return the answer in a label: its boxed or ``####`` part if it has one, otherwise the whole
    label.
    """
    text = as_latex(str(label))
    marked = _marked_answer(text)
    return (text if marked is None else marked).strip()


def _marked_answer(text: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None or _MARK not in text:
        return boxed
    after = text.rsplit(_MARK, 1)[1].strip()
    return after.split("\n", 1)[0].strip() or None


async def math_reward(args: RewardConfig, sample: Sample) -> float | None:
    """Reward type ``math``. None if the verifier gave no result."""
    response = after_thinking(sample.response)
    gold = gold_answer(sample.label)
    marked = last_boxed(response)
    if marked is None and args.math_answer == "boxed":
        return 0.0
    marked = _marked_answer(response) if marked is None else marked
    if marked is not None:
        return await _compare(args, sample, gold, as_latex(marked))
    # cut before the conversion, because this runs on the event loop
    tail = as_latex(response[-_TAIL:])[-_TAIL:]
    gold_value = as_number(gold)
    value = last_number(tail)
    # Text without a number or a mathematical character can only equal the label literally.
    if value is None and not any(character in tail for character in "\\$=+*/^0123456789"):
        return float(normalize_math(gold) == normalize_math(tail))
    if gold_value is not None and gold_value == value and "\\" not in tail and "$" not in tail:
        return 1.0
    return _as_reward(await verify(args, sample, _RESPONSE_EQUAL, gold, tail))


async def deepscaler_reward(args: RewardConfig, sample: Sample) -> float | None:
    """Reward type ``deepscaler``. None if the verifier gave no result."""
    boxed = last_boxed(answer_after_reasoning(sample.response) or "")
    if boxed is None:
        return 0.0
    return await _compare(args, sample, gold_answer(sample.label), as_latex(boxed))


async def _compare(reward: RewardConfig, sample: Sample, gold: str, answer: str) -> float | None:
    decided = decide(gold, answer)
    if decided is not None:
        return float(decided)
    return _as_reward(await verify(reward, sample, _EQUAL, gold, answer))


def _as_reward(value: bool | None) -> float | None:
    return None if value is None else float(value)


def _label_problem(label: object, _: Mapping[str, object]) -> str | None:
    if missing := missing_label(label):
        return missing
    gold = gold_answer(label)
    if gold.startswith('{"'):
        return f"label {gold[:80]!r} is the text of a JSON object: give its answer a column"
    if not normalize_math(gold):
        return f"label {str(label)[:80]!r} contains nothing but spaces and signs"
    braces = re.sub(r"\\.", "", gold, flags=re.DOTALL)
    if braces.count("{") != braces.count("}"):
        return f"label {gold[:80]!r} has unbalanced braces"
    prose = re.sub(r"\\[A-Za-z]+", " ", gold)
    if not re.search(r"[\d=^_+*/<>\\]", gold) and len(re.findall(r"[A-Za-z]{2,}", prose)) > 4:
        return (
            f"label {gold[:80]!r} reads like a sentence, not a mathematical answer (type f1 "
            "compares texts)"
        )
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


# --- dapo ----------------------------------------------------------------------------------------

_DAPO_TAIL = 300
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
NO_ANSWER = "[INVALID]"


def dapo_reward(sample: Sample) -> dict[str, Any]:
    """Score one sample."""
    found = final_answer(after_thinking(sample.response)[-_DAPO_TAIL:])
    correct, pred = judged(found, str(sample.label))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def judged(found: str | None, label: str) -> tuple[bool, str]:
    """Return whether an answer equals the label without a symbolic comparison, and its normal
    form.
    """
    if found is None:
        return False, NO_ANSWER
    return same_answer(_plain(label), _plain(found)) is True, normal_answer(found)


def final_answer(text: str) -> str | None:
    """Return the line that follows the last ``Answer:``, which may be the next one, or None."""
    found = _ANSWER.findall(text)
    return found[-1] if found else None


def normal_answer(text: str) -> str:
    """Return the normal form of an answer: a number by its value, without its unit, and all else as
    normalized text.
    """
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


def _dapo_label_problem(label: object, _: Mapping[str, object]) -> str | None:
    return missing_label(label) or (
        None
        if "\n" not in str(label).strip()
        else f"label {str(label)[:80]!r} has more than one line"
    )


def _dapo_check(reward: RewardConfig) -> list[str]:
    if reward.reward_key or reward.reward_weights or reward.custom_reward_post_process_path:
        return []
    return [
        f"--rm-type {reward.rm_type} gives a dict of score, acc and pred: add --reward-key score"
    ]


DAPO = Reward(
    dapo_reward,
    label_problem=_dapo_label_problem,
    needs_label=True,
    own_answer=lambda label, sample: f"Answer: {label}",
    boxed=lambda boxed, response: f"Answer: {boxed}",
    check=_dapo_check,
)
