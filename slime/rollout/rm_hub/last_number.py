"""Reward ``last_number``: 1.0 when the last number of the response equals the label, else 0.0."""

from __future__ import annotations

from slime.data.sample import Sample
from slime.rollout.rm_hub.text import as_number, last_number


def last_number_reward(sample: Sample) -> float:
    """Exact comparison of values: ``1,000`` equals ``1000.0``. Raises ValueError for a label that is no number."""
    gold = as_number(str(sample.label))
    if gold is None:
        raise ValueError(f"reward type last_number: label {sample.label!r} of sample {sample.index} is not a number")
    return float(last_number(sample.response) == gold)
