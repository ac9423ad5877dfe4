"""The score of held-out answers. run.sh names it: --custom-rm-path reward.py:reward

The model does not learn from it: it learns from the pairs in data.jsonl, or from the
teacher. Test it with a small engine: bash run.sh check-hooks
"""

from __future__ import annotations

import re

from slime.utils.types import Sample


async def reward(args: object, sample: Sample, **kwargs: object) -> float:
    """1 if the last number of the response is the label of the row, else 0."""
    numbers = re.findall(r"-?\d+", sample.response)
    return float(bool(numbers) and numbers[-1] == str(sample.label))
