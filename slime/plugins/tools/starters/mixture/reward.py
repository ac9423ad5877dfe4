"""The rewards of this task. mixture.yaml names one for each data set, run.sh the one of the evaluation.

Test them with a small engine before you train: bash run.sh check-hooks
"""

from __future__ import annotations

import re

from slime.utils.types import Sample


async def reward(args: object, sample: Sample, **kwargs: object) -> float:
    """1 if the last number of the response is the label of the row, else 0."""
    numbers = re.findall(r"-?\d+", sample.response)
    return float(bool(numbers) and numbers[-1] == str(sample.label))


async def close(args: object, sample: Sample, **kwargs: object) -> float:
    """The same, and a little for a number that is close: with rewards that are always 0, nothing
    can be learned.
    """
    numbers = re.findall(r"-?\d+", sample.response)
    if not numbers or numbers[-1] == str(sample.label):
        return await reward(args, sample)
    return 0.1 if abs(int(numbers[-1][:9]) - int(sample.label)) <= 2 else 0.0  # type: ignore[arg-type]
