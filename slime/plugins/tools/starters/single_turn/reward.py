"""The reward of this task. run.sh names it: --custom-rm-path reward.py:reward

Test it with a small engine before you train: bash run.sh check-hooks
"""

from __future__ import annotations

import re
from typing import Any

from slime.utils.types import Sample


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Score one response; slime calls this for every sample.

    ``sample.prompt`` is the prompt, ``sample.response`` the text that the model wrote,
    ``sample.label`` the label of the row in data.jsonl, and ``sample.metadata`` the row's metadata.
    The responses to a prompt are compared with their mean, so only differences between responses to
    the same prompt count.
    """
    numbers = re.findall(r"-?\d+", sample.response)
    if not numbers:
        return 0.0
    if numbers[-1] == str(sample.label):
        return 1.0
    # A little for an answer that is close: with rewards that are always 0, nothing can be learned.
    return 0.1 if abs(int(numbers[-1][:9]) - int(sample.label)) <= 2 else 0.0  # type: ignore[arg-type]
