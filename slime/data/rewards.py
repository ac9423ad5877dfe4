"""From the reward of a sample to the number that trains it: normalisation within the prompt's group."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from slime.config.hooks import load_function
from slime.data.sample import Sample

_STD_EPSILON = 1e-6
_MEAN_AND_STD = ("grpo", "gspo", "cispo")
_MEAN_ONLY = ("reinforce_plus_plus_baseline",)


def post_process_rewards(
    args: Any, samples: Sequence[Sample], group_keys: Sequence[Hashable]
) -> tuple[list[float], list[float]]:
    """Raw and trained reward of every sample.

    grpo, gspo, cispo: ``R = (r - mean_G) / (std_G + 1e-6)`` with the unbiased deviation, which is left
    out by ``--disable-grpo-std-normalization`` and where the group has one sample.
    reinforce_plus_plus_baseline: ``R = r - mean_G``. Others, and all with
    ``--disable-rewards-normalization``: ``R = r``. ``G`` are the samples with the same group key,
    wherever they stand. A sample whose verifier timed out is in no statistics; its raw reward is NaN,
    its trained one 0. ``--custom-reward-post-process-path`` replaces all of this.

    Source: Shao et al., "DeepSeekMath" (GRPO), arXiv:2402.03300, section 4.1.

    Raises:
        ValueError: a sample without a reward, or a hook that gives other than one reward per sample.
    """
    if getattr(args, "custom_reward_post_process_path", None):
        return _custom(args, samples)
    raw = [math.nan if s.reward_timed_out else _number(args, s) for s in samples]
    estimator = getattr(args, "advantage_estimator", "grpo")
    if not getattr(args, "rewards_normalization", True) or estimator not in _MEAN_AND_STD + _MEAN_ONLY:
        return raw, [0.0 if math.isnan(r) else r for r in raw]
    by_std = estimator in _MEAN_AND_STD and getattr(args, "grpo_std_normalization", True)
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(group_keys):
        if not math.isnan(raw[i]):
            groups.setdefault(key, []).append(i)
    rewards = [0.0] * len(samples)
    for members in groups.values():
        for i, reward in zip(members, _normalize([raw[i] for i in members], by_std), strict=True):
            rewards[i] = reward
    return raw, rewards


def _normalize(rewards: list[float], by_std: bool) -> list[float]:
    # fsum: equal rewards give exactly zero, whatever their number and order, so their group can be skipped.
    mean = math.fsum(rewards) / len(rewards) if min(rewards) != max(rewards) else rewards[0]
    centred = [r - mean for r in rewards]
    if not by_std or len(rewards) < 2:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + _STD_EPSILON) for c in centred]


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
