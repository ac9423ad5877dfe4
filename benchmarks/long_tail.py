"""Generate function of ``async_run.py --tail``: answers whose lengths have a long tail, the same in
every run.
"""

from __future__ import annotations

import math
import random
from typing import Any

from slime.data.sample import Sample
from slime.rollout.generate import generate as ask
from slime.types import SamplingParams

CUT = 16  # medians, as in benchmarks/async_simulation.py


async def generate(args: Any, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """One answer of log-normal length: sigma 1, cut at ``--rollout-max-response-len``, which is 16
    medians.
    """
    longest = int(args.rollout_max_response_len)
    drawn = longest / CUT * math.exp(random.Random(f"length {sample.index}").gauss(0.0, 1.0))
    return await ask(
        args,
        sample,
        {**sampling_params, "max_new_tokens": max(1, min(int(drawn), longest)), "ignore_eos": True},
    )
