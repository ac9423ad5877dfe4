"""Rewards ``last_number`` (1.0 if the last number in the response equals the label) and ``random``
(0 or 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

from slime.config.seeds import derive_seed
from slime.data.reasoning import after_thinking
from slime.data.sample import Sample
from slime.plugins.rewards.answers import as_number, last_number
from slime.rollout.rm_hub.reward import Reward, missing_label

if TYPE_CHECKING:
    from slime.config.args import Args


def last_number_reward(sample: Sample) -> float:
    """Score one sample. Values are compared exactly: ``1,000`` equals ``1000.0``.

    Raises:
        ValueError: The label is not a number.
    """
    gold = number_label(sample.label)
    if gold is None:
        raise ValueError(
            f"reward type last_number: label {sample.label!r} of sample {sample.index} is not a "
            "number"
        )
    return float(last_number(after_thinking(sample.response)) == gold)


def number_label(label: object) -> Fraction | None:
    """Return the value of a label that is one decimal number, else None.

    Fractions such as ``3/4`` give None, because :func:`last_number` finds no fractions in a
    response.
    """
    value = as_number(str(label))
    return value if value is not None and last_number(str(label)) == value else None


def _label_problem(label: object, _: Mapping[str, object]) -> str | None:
    missing = missing_label(label)
    return missing or (
        None if number_label(label) is not None else f"label {str(label)[:80]!r} is not a number"
    )


LAST_NUMBER = Reward(last_number_reward, label_problem=_label_problem)


def random_reward(args: Args, sample: Sample) -> int:
    """Return 0 or 1, derived from the seed of the run and the index of the sample."""
    return derive_seed(args.rollout_seed, "random reward", sample.index or 0) & 1


RANDOM = Reward(random_reward, reads_reasoning=True, own_answer=None)
