"""Reward ``last_number``: 1.0 if the last number in the response equals the label, else 0.0."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from slime.data.reasoning import after_thinking
from slime.data.sample import Sample
from slime.rollout.rm_hub.reward import Reward, missing_label
from slime.rollout.rm_hub.text import as_number, last_number


def last_number_reward(sample: Sample) -> float:
    """Score one sample. Values are compared exactly: ``1,000`` equals ``1000.0``.

    Raises:
        ValueError: The label is not a number.
    """
    gold = number_label(sample.label)
    if gold is None:
        raise ValueError(f"reward type last_number: label {sample.label!r} of sample {sample.index} is not a number")
    return float(last_number(after_thinking(sample.response)) == gold)


def number_label(label: object) -> Fraction | None:
    """Return the value of a label that is one decimal number, else None.

    Fractions such as ``3/4`` give None, because :func:`last_number` finds no fractions in a response.
    """
    value = as_number(str(label))
    return value if value is not None and last_number(str(label)) == value else None


def _label_problem(label: object, _: Mapping[str, object]) -> str | None:
    missing = missing_label(label)
    return missing or (None if number_label(label) is not None else f"label {str(label)[:80]!r} is not a number")


LAST_NUMBER = Reward(last_number_reward, label_problem=_label_problem)
