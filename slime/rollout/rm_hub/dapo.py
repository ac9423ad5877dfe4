r"""Reward ``dapo``: the last ``Answer: ...`` in the last 300 characters, compared with the label.

The reward is ``{"score": 1.0 or -1.0, "acc": bool, "pred": str}``. Train with ``--reward-key score``.
Source: the rule-based reward of DAPO (Yu et al. 2025, arXiv:2503.14476), section 4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slime.data.reasoning import after_thinking
from slime.data.sample import Sample
from slime.rollout.rm_hub.answers import same_answer, value_of
from slime.rollout.rm_hub.reward import Reward, missing_label
from slime.rollout.rm_hub.text import as_latex, last_boxed, normalize_math

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
