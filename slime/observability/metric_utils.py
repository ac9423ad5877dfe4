"""Documented import path of statistics for users' logging functions: spread, pass rates, prefixes,
steps.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from slime.config.args import Args

T = TypeVar("T")
_REPETITION_CHARACTERS = 10_000
_REPETITION_RATIO = 10.0


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Return ``mean``, ``median``, ``max`` and ``min``; empty if there are no values."""
    if not len(values):
        return {}
    numbers = [float(value) for value in values]
    return {
        "mean": fmean(numbers),
        "median": float(median(numbers)),
        "max": max(numbers),
        "min": min(numbers),
    }


def dict_add_prefix(d: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Return the mapping with ``prefix`` before each name."""
    return {f"{prefix}{name}": value for name, value in d.items()}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the probability that ``k`` of ``samples`` samples contain at least one of the
    ``correct`` ones.

    The estimate is unbiased: ``1 - C(n-c, k) / C(n, k)``. Source: Chen et al. 2021,
    arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """Return ``pass@k`` for k = 1, 2, 4, … up to ``group_size``: the mean over groups. A reward of
    1 is a pass.

    Args:
        flat_rewards: The rewards of all groups, group by group.
        num_groups: Number of groups. Default: as many as the rewards fill.

    Raises:
        ValueError: There are not ``group_size`` rewards for each group.
    """
    groups = len(flat_rewards) // group_size if num_groups is None else num_groups
    if groups * group_size != len(flat_rewards):
        raise ValueError(f"{len(flat_rewards)} rewards are not {groups} groups of {group_size}")
    if group_size == 1 or not groups:
        return {}
    correct = [
        sum(reward == 1 for reward in flat_rewards[group * group_size : (group + 1) * group_size])
        for group in range(groups)
    ]
    powers = [1 << power for power in range(group_size.bit_length()) if 1 << power <= group_size]
    return {
        f"pass@{k}": fmean(pass_at_k(group_size, count, k) for count in correct) for k in powers
    }


def compute_rollout_step(args: Args, rollout_id: int) -> int:
    """Return the value of the x-axis for a rollout: its number, or with
    ``--wandb-always-use-train-step`` the number of optimizer steps before it."""
    if not args.wandb_always_use_train_step:
        return rollout_id
    return (
        rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    )


def compression_ratio(data: str | bytes) -> float:
    """Return how many times smaller ``zlib`` makes the data; 0 for empty data."""
    raw = data.encode() if isinstance(data, str) else data
    return len(raw) / len(zlib.compress(raw)) if raw else 0.0


def has_repetition(text: str) -> bool:
    """Whether the last 10,000 characters can be compressed by more than a factor of 10."""
    return compression_ratio(text[-_REPETITION_CHARACTERS:]) > _REPETITION_RATIO
