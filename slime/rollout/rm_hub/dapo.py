r"""Reward ``dapo``: the last ``Answer: ...`` in the last 300 characters, compared with the label as normalized text.

The reward is ``{"score": 1.0 or -1.0, "acc": bool, "pred": str}``. Train with ``--reward-key score``.
Source: the rule-based reward of DAPO (Yu et al. 2025, arXiv:2503.14476), section 4.
"""

from __future__ import annotations

import re
from typing import Any

from slime.data.sample import Sample
from slime.rollout.rm_hub.text import after_thinking, as_number, last_boxed, normalize_math

_TAIL = 300
_ANSWER = re.compile(r"answer\s*:[ \t]*([^\n]+)", re.IGNORECASE)
NO_ANSWER = "[INVALID]"


def dapo_reward(sample: Sample) -> dict[str, Any]:
    """Score one sample."""
    found = _ANSWER.findall(after_thinking(sample.response)[-_TAIL:])
    pred = _normal(found[-1]) if found else NO_ANSWER
    correct = pred == _normal(str(sample.label))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def _normal(text: str) -> str:
    """Return the form in which answers and labels are compared: numbers by value, all else as normalized text."""
    text = text.strip().strip("*").strip()
    boxed = last_boxed(text)
    text = text if boxed is None else boxed
    text = text.strip().strip("*").removesuffix(".").strip()
    if text.startswith("\\(") and text.endswith("\\)"):
        text = text[2:-2]
    value = as_number(text)
    if value is None:
        return normalize_math(text)
    return str(value.numerator) if value.denominator == 1 else str(value)
