"""Reward ``random``: 0 or 1 by a coin of each sample's own, for tests of the loop."""

from __future__ import annotations

from typing import Any

from slime.config.seeds import derive_seed
from slime.data.sample import Sample


def random_reward(args: Any, sample: Sample) -> int:
    """The same for the same run seed and sample index."""
    return derive_seed(int(getattr(args, "rollout_seed", 42)), "random reward", sample.index or 0) & 1
