"""Reward ``last_number``: 1.0 when the last number of the response equals the label, else 0.0."""

from __future__ import annotations

from fractions import Fraction

from slime.data.sample import Sample
from slime.rollout.rm_hub.text import after_thinking, as_number, last_number


def last_number_reward(sample: Sample) -> float:
    """Exact comparison of values: ``1,000`` equals ``1000.0``. Raises ValueError for a label that is no number."""
    gold = number_label(sample.label)
    if gold is None:
        raise ValueError(f"reward type last_number: label {sample.label!r} of sample {sample.index} is not a number")
    return float(last_number(after_thinking(sample.response)) == gold)


def number_label(label: object) -> Fraction | None:
    """Value of a label that is one decimal number; None for anything else, fractions included (no text ends in one)."""
    value = as_number(str(label))
    return value if value is not None and last_number(str(label)) == value else None
