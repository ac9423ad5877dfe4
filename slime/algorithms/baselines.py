"""Group baselines, which are subtracted from rewards to compute advantages, and DAPO's penalty of
long responses.

They are applied to whole groups when rewards are post-processed, so this file does not need torch.
Each baseline takes the rewards of one group. Equal rewards give exactly 0, for any number and
order, so that the training step can skip their group.

DAPO is GRPO with four changes, each with its own flag:

====================
================================================================================
clip-higher          ``--eps-clip 0.2 --eps-clip-high 0.28`` (:mod:`.losses`)
token mean           ``--calculate-per-token-loss`` (:mod:`.sequences`)
overlong shaping     ``--overlong-buffer-len`` and ``--overlong-penalty`` (here)
dynamic sampling     ``--dynamic-sampling-filter-path
                     slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std``
====================
================================================================================

Source: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

STD_EPSILON = 1e-6


def centred(rewards: Sequence[float]) -> list[float]:
    """r_i − mean of the group.

    Source: Liu et al., "Understanding R1-Zero-Like Training" (Dr. GRPO, 2025); also the baseline of
    REINFORCE++-baseline, Hu et al. (2025).
    """
    # The mean of equal numbers may differ from them by rounding, which would give a difference
    # other than 0.
    mean = math.fsum(rewards) / len(rewards) if min(rewards) != max(rewards) else rewards[0]
    return [r - mean for r in rewards]


def standardized(rewards: Sequence[float]) -> list[float]:
    """(r_i − mean) / (std + 1e-6), where the standard deviation is the unbiased one (n − 1); 0 for
    a group of one.

    Source: Shao et al., "DeepSeekMath" (GRPO, 2024), section 4.1.
    """
    difference = centred(rewards)
    if len(rewards) < 2:
        return difference
    std = math.sqrt(math.fsum(d * d for d in difference) / (len(rewards) - 1))
    return [d / (std + STD_EPSILON) for d in difference]


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """Return the (negative) number to add to the reward of a long response.

    It is 0 up to ``max_length − buffer`` tokens, and then decreases linearly to ``−factor`` at
    ``max_length`` (eq. 13).
    """
    excess = length - (max_length - buffer)
    return -factor * min(max(excess, 0) / buffer, 1.0)
