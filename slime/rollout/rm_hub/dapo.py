r"""Reward ``dapo``: the last ``Answer: ...`` in the last 300 characters, compared with the label as normalized text.

The reward is ``{"score": 1.0 or -1.0, "acc": bool, "pred": str}``. Train with ``--reward-key score``.
Source: the rule-based reward of DAPO (Yu et al. 2025, arXiv:2503.14476), section 4.
"""

from __future__ import annotations

import re
from typing import Any

from slime.data.sample import Sample
from slime.rollout.rm_hub.text import after_thinking, as_number, last_boxed, normalize_math, without_unit

_TAIL = 300
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_STYLED_UNIT = re.compile(
    r"(.*\d[}$)]*)(?:\s|\\[,;:! ]|~)*\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}(?:\^\{?[23]\}?)?\$?"
)
NO_ANSWER = "[INVALID]"


def dapo_reward(sample: Sample) -> dict[str, Any]:
    """Score one sample."""
    found = final_answer(after_thinking(sample.response)[-_TAIL:])
    pred = NO_ANSWER if found is None else normal_answer(found)
    correct = pred == normal_answer(str(sample.label))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def final_answer(text: str) -> str | None:
    """Return the line that follows the last ``Answer:``, which may be the next one, or None."""
    found = _ANSWER.findall(text)
    return found[-1] if found else None


def normal_answer(text: str) -> str:
    """Return the form in which answers and labels are compared: numbers by value, all else as normalized text. Units
    after a number (``57 dollars``, ``57\\text{ cm}``) are removed."""
    text = text.strip().strip("*").strip()
    boxed = last_boxed(text)
    text = text if boxed is None else boxed
    text = text.strip().strip("*").removesuffix(".").strip()
    if text.startswith("\\(") and text.endswith("\\)"):
        text = text[2:-2]
    styled = _STYLED_UNIT.fullmatch(text)
    value = as_number(without_unit(text if styled is None else styled[1]))
    value = as_number(normalize_math(text)) if value is None else value  # x = 5.0
    if value is None:
        return normalize_math(text)
    return str(value.numerator) if value.denominator == 1 else str(value)
