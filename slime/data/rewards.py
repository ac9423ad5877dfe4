"""Post-processing of rewards: normalization within the group of a prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from statistics import fmean
from typing import SupportsFloat

from slime.algorithms.algorithm import Algorithm, Scored, checked_numbers, subtract_baseline
from slime.algorithms.baselines import overlong_penalty
from slime.config.algorithm import create_algorithm
from slime.config.args import Args
from slime.config.data import RewardConfig
from slime.config.hooks import load_function
from slime.data.sample import Sample

PASS_ABOVE = 0.5  # a reward closer to 1 than to 0 is a pass; this also fits rewards of -1 and 1

PARTS_KEY = "reward_parts"
"""The key of the metadata of a sample with several rewards, under which they are kept by name."""
Groups = dict[Hashable, dict[Hashable, list[int]]]
"""The positions of the samples with a reward, by group and by rollout in it."""


def keys_of_rollouts(samples: Iterable[Sample]) -> list[Hashable]:
    """Return one key per sample. Only samples into which one rollout fanned out have the same
    key.
    """
    return [
        ("own", i) if s.rollout_id is None else (s.group_index, s.rollout_id)
        for i, s in enumerate(samples)
    ]


def mean_reward(rewards: Sequence[float]) -> float:
    """Return the mean, which for equal numbers is exactly that number."""
    return fmean(rewards) if min(rewards) != max(rewards) else rewards[0]


def shares_in_rollouts(
    rollout_ids: Sequence[Hashable], raw_rewards: Sequence[float]
) -> list[float]:
    """Return for each sample 1 / the number of samples of its rollout that have a reward, or 0 if
    it has none itself.

    With these weights, a mean of rewards over samples counts each rollout once.
    """
    known = [not math.isnan(float(reward)) for reward in raw_rewards]
    sizes = Counter(
        rollout for rollout, has_reward in zip(rollout_ids, known, strict=True) if has_reward
    )
    return [
        1 / sizes[rollout] if has_reward else 0.0
        for rollout, has_reward in zip(rollout_ids, known, strict=True)
    ]


def post_process_rewards(
    args: Args,
    samples: Sequence[Sample],
    group_keys: Sequence[Hashable],
    rollout_keys: Sequence[Hashable] | None = None,
) -> tuple[list[float], list[float]]:
    """Return the raw and the trained reward of every sample.

    The trained reward is the raw one plus the penalty of ``--overlong-buffer-len``, minus the group
    baseline of ``--advantage-estimator``. With ``--disable-rewards-normalization``, no baseline is
    subtracted. Samples with the same key form a group, regardless of their positions.
    ``--custom-reward-post-process-path`` replaces all of this.

    The baseline compares rollouts: the samples into which one rollout fanned out count once, with
    their mean reward.

    Args:
        rollout_keys: The rollout of each sample. Default: :func:`keys_of_rollouts`.

    Raises:
        ValueError: A sample has no reward, or the user's function does not return one number per
            sample.
    """
    if path := args.custom_reward_post_process_path:
        return _checked(path, load_function(path)(args, list(samples)), len(samples))
    # Raw rewards stay as they are for metrics; everything below changes ``shaped`` only.
    raw = [trained_reward(args, sample) for sample in samples]
    shaped = raw
    if args.overlong_buffer_len:
        shaped = [
            reward
            + overlong_penalty(
                sample.response_length,
                args.rollout_max_response_len,
                args.overlong_buffer_len,
                args.overlong_penalty,
            )
            for reward, sample in zip(raw, samples, strict=True)
        ]
    # A sample whose verifier timed out says nothing about the others: it is left out of its group's
    # statistics, and its trained reward is 0. Its raw reward is NaN, so that metrics can leave it
    # out.
    rewards = [0.0 if math.isnan(reward) else reward for reward in shaped]
    if not args.rewards_normalization:
        return raw, rewards
    rollouts = keys_of_rollouts(samples) if rollout_keys is None else rollout_keys
    groups: Groups = {}
    for i, reward in enumerate(shaped):
        if not math.isnan(reward):
            groups.setdefault(group_keys[i], {}).setdefault(rollouts[i], []).append(i)
    compared = _minus_baselines(create_algorithm(args), samples, shaped, groups)
    return raw, [compared.get(i, reward) for i, reward in enumerate(rewards)]


def _minus_baselines(
    algorithm: Algorithm, samples: Sequence[Sample], rewards: Sequence[float], groups: Groups
) -> dict[int, float]:
    """Return the rewards of the samples in ``groups`` minus their baselines, by position."""
    units = [(key, members) for key, group in groups.items() for members in group.values()]
    scored = [
        Scored(
            key,
            mean_reward([rewards[i] for i in members]),
            _mean_parts(samples, members),
            samples[members[0]].metadata,
        )
        for key, members in units
    ]
    joint = algorithm.batch_baseline(scored)
    found: dict[int, float] = {}
    if joint is None:
        for group in groups.values():
            found |= _compared(algorithm, rewards, list(group.values()))
        return found
    values = checked_numbers(f"{type(algorithm).__name__}.batch_baseline", joint, len(units))
    for (_, members), value in zip(units, values, strict=True):
        found |= dict.fromkeys(members, value)
    return found


def _compared(
    algorithm: Algorithm, rewards: Sequence[float], rollouts: Sequence[Sequence[int]]
) -> dict[int, float]:
    """Return the rewards of the samples of one group minus its baseline, by position.

    The baseline is that of rollouts; the samples of one rollout then share its reward.

    Args:
        rollouts: The positions of the samples of each rollout.
    """
    means = [mean_reward([rewards[i] for i in members]) for members in rollouts]
    reduced = subtract_baseline(algorithm, means)
    found: dict[int, float] = {}
    for position, members in enumerate(rollouts):
        for i in members:
            if rewards[i] == means[position]:
                found[i] = reduced[position]
                continue
            # A sample whose reward is not that of its rollout (the overlong penalty depends on its
            # length, say) is compared with the other rollouts.
            own = [*means[:position], rewards[i], *means[position + 1 :]]
            found[i] = subtract_baseline(algorithm, own)[position]
    return found


def _mean_parts(samples: Sequence[Sample], members: Sequence[int]) -> dict[str, float]:
    """Return the several rewards of one rollout: for each name, the mean over its samples that have
    it.
    """
    values: dict[str, list[float]] = {}
    for i in members:
        for name, value in samples[i].metadata.get(PARTS_KEY, {}).items():
            values.setdefault(name, []).append(value)
    return {name: mean_reward(found) for name, found in values.items()}


def trained_reward(reward: RewardConfig, sample: Sample) -> float:
    """Return the reward of a sample as a number; NaN if its verifier gave no result.

    Raises:
        ValueError: It is missing, of another form, or not finite.
    """
    if sample.reward_timed_out:
        return math.nan
    value: SupportsFloat | dict[str, object] | None = sample.get_reward_value(reward)
    if isinstance(value, dict):
        raise ValueError(
            f"the reward of sample {sample.index} is {value}: name the entry with the number to train "
            "with --reward-key"
        )
    if value is None:
        raise ValueError(
            f"sample {sample.index} (group {sample.group_index}, {sample.status.value}) has no "
            "reward: set --rm-type or --custom-rm-path, or let the generate function set "
            "sample.reward"
        )
    value = reward_number(sample, value)
    if not math.isfinite(value):
        raise ValueError(
            f"the reward of sample {sample.index} is {value}, but it must be finite (None: no reward)"
        )
    return value


def reward_number(sample: Sample, value: object) -> float:
    """Convert a reward to a float.

    Raises:
        ValueError: It is a tuple, a list, a text or the like.
    """
    try:
        return float(value)  # type: ignore[arg-type]  # what is no number raises the error below
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the reward of sample {sample.index} is {value!r:.100}, a {type(value).__name__}: a "
            "reward is a number, a dict of numbers, or None"
        ) from error


def _checked(path: str, result: object, count: int) -> tuple[list[float], list[float]]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"--custom-reward-post-process-path {path} must return (raw_rewards, rewards)"
        )
    raw, rewards = ([float(x) for x in part] for part in result)
    if len(raw) != count or len(rewards) != count:
        raise ValueError(
            f"--custom-reward-post-process-path {path} gave {len(raw)} and {len(rewards)} for "
            f"{count} samples"
        )
    return raw, rewards
