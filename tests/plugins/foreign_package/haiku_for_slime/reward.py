"""A reward type."""

from __future__ import annotations

from collections.abc import Mapping

from slime.data.sample import Sample
from slime.rollout.rm_hub.reward import Reward


def vowels(sample: Sample) -> float:
    return sum(letter in "aeiou" for letter in sample.response) / max(len(sample.response), 1)


def label_problem(label: object, metadata: Mapping[str, object]) -> str | None:
    return "the label must not be 'forbidden'" if label == "forbidden" else None


VOWELS = Reward(vowels, label_problem=label_problem)
