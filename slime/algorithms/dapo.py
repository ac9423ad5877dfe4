"""DAPO: GRPO with four changes, each with its own flag.

==================== ================================================================================
clip-higher          ``--eps-clip 0.2 --eps-clip-high 0.28`` (:mod:`.policy_loss`)
token mean           ``--calculate-per-token-loss`` (:mod:`.reductions`)
overlong shaping     ``--overlong-buffer-len`` and ``--overlong-penalty`` (here)
dynamic sampling     ``--dynamic-sampling-filter-path
                     slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std``
==================== ================================================================================

Source: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025).
"""

from __future__ import annotations


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """Return the (negative) number to add to the reward of a long response.

    It is 0 up to ``max_length − buffer`` tokens, and then decreases linearly to ``−factor`` at ``max_length`` (eq. 13).
    """
    excess = length - (max_length - buffer)
    return -factor * min(max(excess, 0) / buffer, 1.0)
