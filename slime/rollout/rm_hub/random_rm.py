"""Reward ``random``: 0 or 1 at random, for tests of the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.config.seeds import derive_seed
from slime.data.sample import Sample
from slime.rollout.rm_hub.reward import Reward

if TYPE_CHECKING:
    from slime.config.args import Args


def random_reward(args: Args, sample: Sample) -> int:
    """Return 0 or 1, derived from the seed of the run and the index of the sample."""
    return derive_seed(args.rollout_seed, "random reward", sample.index or 0) & 1


RANDOM = Reward(random_reward, reads_reasoning=True, own_answer=None)
