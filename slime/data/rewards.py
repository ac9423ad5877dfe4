"""From the reward of a sample to the number that trains it: normalisation within the prompt's group."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from slime.algorithms.baselines import centred, standardized
from slime.algorithms.dapo import overlong_penalty
from slime.algorithms.rloo import leave_one_out
from slime.config.hooks import load_function
from slime.data.sample import Sample

BASELINES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "grpo": standardized,
    "gspo": standardized,
    "cispo": standardized,
    "rloo": leave_one_out,
    "dr_grpo": centred,
    "reinforce_plus_plus_baseline": centred,
}
"""Group baseline of each estimator that has one."""

WITHOUT_BASELINE = ("reinforce_plus_plus", "ppo")
"""Estimators that train on the reward as it is."""


def require_known_estimator(name: str) -> None:
    """Raises ValueError for an estimator that nothing here says how to treat: without a baseline of its own it would
    silently train on raw rewards."""
    if name not in BASELINES and name not in WITHOUT_BASELINE:
        raise ValueError(
            f"--advantage-estimator {name}: no group baseline is registered for it; give it one in "
            "slime.data.rewards.BASELINES, or name it in WITHOUT_BASELINE if it trains on rewards as they are"
        )


def post_process_rewards(
    args: Any, samples: Sequence[Sample], group_keys: Sequence[Hashable]
) -> tuple[list[float], list[float]]:
    """Raw and trained reward of every sample.

    The trained one is the reward plus the penalty of ``--overlong-buffer-len``, less the estimator's group
    baseline (:data:`BASELINES`; ``--disable-grpo-std-normalization`` and a group of one leave out the
    deviation). Estimators without one, and all with ``--disable-rewards-normalization``, train on the
    reward itself. A group are the samples with the same key, wherever they stand. A sample whose verifier
    timed out is in no statistics; its raw reward is NaN, its trained one 0.
    ``--custom-reward-post-process-path`` replaces all of this.

    Raises:
        ValueError: an unknown estimator, a sample without a reward, or a hook that gives other than one reward per
            sample.
    """
    if getattr(args, "custom_reward_post_process_path", None):
        return _custom(args, samples)
    raw = [math.nan if s.reward_timed_out else _number(args, s) for s in samples]
    shaped = [r + _length_penalty(args, s) for r, s in zip(raw, samples, strict=True)]
    baseline = _baseline(args)
    if baseline is None:
        return raw, [0.0 if math.isnan(r) else r for r in shaped]
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(group_keys):
        if not math.isnan(shaped[i]):
            groups.setdefault(key, []).append(i)
    rewards = [0.0] * len(samples)
    for members in groups.values():
        for i, reward in zip(members, baseline([shaped[i] for i in members]), strict=True):
            rewards[i] = reward
    return raw, rewards


def _baseline(args: Any) -> Callable[[Sequence[float]], list[float]] | None:
    if not getattr(args, "rewards_normalization", True):
        return None
    name = getattr(args, "advantage_estimator", "grpo")
    require_known_estimator(name)
    baseline = BASELINES.get(name)
    if baseline is standardized and not getattr(args, "grpo_std_normalization", True):
        return centred
    return baseline


def _length_penalty(args: Any, sample: Sample) -> float:
    buffer = getattr(args, "overlong_buffer_len", 0)
    if not buffer:
        return 0.0
    return overlong_penalty(sample.response_length, args.rollout_max_response_len, buffer, args.overlong_penalty)


def _number(args: Any, sample: Sample) -> float:
    value = sample.get_reward_value(args)
    if isinstance(value, dict):
        raise ValueError(f"the reward of sample {sample.index} is {value}: say which entry trains with --reward-key")
    if value is None:
        raise ValueError(
            f"sample {sample.index} (group {sample.group_index}, {sample.status.value}) has no reward: "
            "set --rm-type or --custom-rm-path, or let the generate function set sample.reward"
        )
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"the reward of sample {sample.index} is {value}")
    return value


def _custom(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    path = args.custom_reward_post_process_path
    result = load_function(path)(args, list(samples))
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"--custom-reward-post-process-path {path} must return (raw_rewards, rewards)")
    raw, rewards = ([float(x) for x in part] for part in result)
    if len(raw) != len(samples) or len(rewards) != len(samples):
        raise ValueError(
            f"--custom-reward-post-process-path {path}: {len(raw)} and {len(rewards)} for {len(samples)} samples"
        )
    return raw, rewards
