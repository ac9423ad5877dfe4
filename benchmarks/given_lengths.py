"""Answers of given lengths, the same on both sides of ``verl_step.py``.

The lengths are in the environment variable :data:`LENGTHS`: ``1024``, or ``log-normal:512:4096``
for a long tail with median 512 (sigma 1), cut at 4096. This file imports neither slime nor verl
before it is asked for an answer.
"""

from __future__ import annotations

import math
import os
import random
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from slime.data.sample import Sample
    from slime.types import SamplingParams

LENGTHS = "GIVEN_LENGTHS"


def longest(lengths: str) -> int:
    """The upper bound of all lengths, in tokens.

    Raises:
        ValueError: The text is neither a number nor ``log-normal:MEDIAN:LONGEST``.
    """
    kind, *numbers = lengths.split(":")
    wanted = numbers if kind == "log-normal" and len(numbers) == 2 else [kind, *numbers]
    if len(wanted) != 1 + (kind == "log-normal") or not all(
        word.isdigit() and int(word) > 0 for word in wanted
    ):
        raise ValueError(
            f"{lengths!r} are no lengths: give a number of tokens, or log-normal:MEDIAN:LONGEST"
        )
    return int(wanted[-1])


def length(lengths: str, number: int) -> int:
    """Tokens of the answer to sample ``number``: its row times the group size, plus its place in
    the group.
    """
    if not lengths.startswith("log-normal:"):
        return int(lengths)
    median, cut = map(int, lengths.split(":")[1:])
    return max(
        1, min(int(median * math.exp(random.Random(f"length {number}").gauss(0.0, 1.0))), cut)
    )


class Limits(TypedDict):
    """The sampling parameters that give an answer its length, by SGLang's names."""

    max_new_tokens: int
    ignore_eos: bool


def limits(number: int) -> Limits:
    """The sampling parameters of sample ``number``."""
    return {"max_new_tokens": length(os.environ[LENGTHS], number), "ignore_eos": True}


async def generate(args: Any, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """slime's ``--custom-generate-function-path``."""
    from slime.rollout.generate import generate as ask

    assert sample.index is not None, "the data source numbers its samples"
    return await ask(args, sample, {**sampling_params, **limits(sample.index)})
