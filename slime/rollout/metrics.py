"""Metrics of the samples of a rollout or an evaluation, as pure functions of samples.

The metrics page of the documentation explains the names. Samples whose verifier gave no result are
excluded from all reward statistics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from slime.data.rewards import PARTS_KEY, PASS_ABOVE, keys_of_rollouts, mean_reward
from slime.data.sample import Sample, flatten
from slime.observability.metric_utils import (
    compute_statistics,
    dict_add_prefix,
    has_repetition,
    pass_at_k,
)
from slime.rollout.base_types import EvalResults
from slime.rollout.rm_hub.outcome import ABSTAINED, FAILURE_KEY, RAISED, TOO_LONG, failure

if TYPE_CHECKING:
    from slime.config.observability import ObservabilityConfig

Metrics = dict[str, float]
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def rollout_metrics(
    logged: ObservabilityConfig,
    reward_key: str | None,
    samples: Sequence[Sample],
    seconds: float | None = None,
    gpus: int = 0,
) -> Metrics:
    """Return the metrics of a rollout.

    These are ``rollout/…``; ``multi_turn/…`` with ``--log-multi-turn``; ``passrate/…`` with
    ``--log-passrate``; and ``perf/…`` if ``seconds`` is given.

    Args:
        reward_key: The entry of a dict reward to average (``--reward-key``).
        samples: The samples of the rollout, flat.
        seconds: The duration of the rollout.
        gpus: The number of the engines' GPUs.
    """
    metrics = dict_add_prefix(sample_metrics(samples, logged.log_reward_category), "rollout/")
    rewards = rollout_rewards(samples, reward_key)
    if rewards:
        metrics["rollout/raw_reward"] = fmean(value for _, value in rewards)
        metrics.update(dict_add_prefix(_without_spread(rewards), "rollout/zero_std/count_"))
    metrics.update(_of_sources(samples, reward_key))
    if logged.log_multi_turn:
        metrics.update(_multi_turn(samples))
    if logged.log_passrate:
        metrics.update({f"passrate/pass@{k}": rate for k, rate in pass_rates(rewards).items()})
    if seconds:
        metrics.update(_speed(samples, seconds, gpus))
    return metrics


def eval_metrics(
    data: Mapping[str, EvalResults], category: str | None = None, passrate: bool = False
) -> Metrics:
    """Return ``eval/<data set>…`` for each data set of an evaluation.

    ``eval/<ds>`` is the mean reward over samples. With n > 1 samples per prompt there are also
    ``eval/<ds>-mean@n``, the mean over prompts of the mean reward of a prompt, and
    ``eval/<ds>-pass@k``, the unbiased estimate for k = 1, 2, 4, … and n. Samples whose verifier
    gave no result are excluded from all of them.

    Args:
        category: See :func:`sample_metrics`.
        passrate: Whether to return mean@n and pass@k also for n = 1 (``--log-passrate``).
    """
    metrics: Metrics = {}
    for name, part in data.items():
        rewards = [float(reward) for reward in part["rewards"]]
        known = [reward for reward in rewards if not math.isnan(reward)]
        if known:
            metrics[f"eval/{name}"] = fmean(known)
        if len(known) < len(rewards):
            metrics[f"eval/{name}-reward_missing_count"] = float(len(rewards) - len(known))
        if part.get("truncated"):
            metrics[f"eval/{name}-truncated_ratio"] = fmean(
                float(value) for value in part["truncated"]
            )
        samples = part.get("samples")
        if samples:
            of_samples = sample_metrics(flatten(samples), category)
            metrics.update(dict_add_prefix(of_samples, f"eval/{name}/"))
        groups = prompt_rewards(part)
        rates = pass_rates([(key, reward) for key, rewards in groups.items() for reward in rewards])
        if len(rates) > 1 or (rates and passrate):
            metrics[f"eval/{name}-mean@{max(rates)}"] = fmean(
                fmean(group) for group in groups.values() if group
            )
            metrics.update({f"eval/{name}-pass@{k}": rate for k, rate in rates.items()})
    return metrics


def prompt_rewards(part: EvalResults) -> dict[Hashable, list[float]]:
    """Return the rewards of each prompt of a data set, without NaN, in the order of the file."""
    groups = _grouped(zip(_prompts(part), map(float, part["rewards"]), strict=True))
    return {
        key: [reward for reward in rewards if not math.isnan(reward)]
        for key, rewards in groups.items()
    }


def sample_metrics(samples: Sequence[Sample], category: str | None = None) -> Metrics:
    """Return metrics of lengths, truncation, repetition, prefix cache, speculative decoding and so
    on.

    The names have no prefix.

    Args:
        category: Key of dict rewards whose values are counted (``--log-reward-category``).
    """
    if not samples:
        return {}
    # Lengths and endings.
    metrics = _spread("response_len", [sample.effective_response_length for sample in samples])
    metrics["truncated_ratio"] = fmean(
        float(sample.status is Sample.Status.TRUNCATED) for sample in samples
    )
    metrics["repetition_frac"] = fmean(float(has_repetition(sample.response)) for sample in samples)
    outcomes = Counter(
        str(s.metadata["code_outcome"]) for s in samples if "code_outcome" in s.metadata
    )
    metrics.update(
        {f"code/{outcome}_count": float(count) for outcome, count in sorted(outcomes.items())}
    )
    metrics.update(_engine_metrics(samples))
    # Several rewards, each over the samples that have it.
    parts = _grouped(part for s in samples for part in s.metadata.get(PARTS_KEY, {}).items())
    metrics.update({f"reward/{name}": fmean(values) for name, values in sorted(parts.items())})
    # How far top-p and top-k cut the vocabulary.
    nuclei = [s for s in samples if s.rollout_top_p_token_offsets is not None and s.response_length]
    if nuclei:
        kept = sum(int(sample.rollout_top_p_token_offsets[-1]) for sample in nuclei)  # type: ignore[index, misc]
        metrics["top_p_kept_vocab_per_token"] = kept / sum(
            sample.response_length for sample in nuclei
        )
    if category:
        found = Counter(
            str(s.reward[category])
            for s in samples
            if isinstance(s.reward, dict) and category in s.reward
        )
        metrics.update(
            {f"error_cat/{name}": count / len(samples) for name, count in sorted(found.items())}
        )
    return metrics


def _engine_metrics(samples: Sequence[Sample]) -> Metrics:
    """Return the use of the engines' caches and drafts; what no engine reported is left out."""
    metrics: Metrics = {}
    prompt_tokens = sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)
    if prompt_tokens:
        cached = sum(sample.prefix_cache_info.cached_tokens for sample in samples)
        metrics["prefix_cache_hit_rate"] = cached / prompt_tokens
        metrics["avg_cached_tokens_per_sample"] = cached / len(samples)
    drafted = sum(sample.spec_info.spec_draft_token_num for sample in samples)
    if drafted:
        metrics["spec_accept_rate"] = (
            sum(sample.spec_info.spec_accept_token_num for sample in samples) / drafted
        )
    verified = sum(sample.spec_info.spec_verify_ct for sample in samples)
    if verified:
        metrics["spec_accept_length"] = (
            sum(sample.spec_info.completion_token_num for sample in samples) / verified
        )
    return metrics


def pass_rates(rewards: Sequence[tuple[Hashable, float]]) -> dict[int, float]:
    """Return pass@k for k = 1, 2, 4, … and the size of the largest group.

    It is the mean over the groups with at least k rewards. A reward above 0.5 is a pass.

    Args:
        rewards: (group, reward) pairs.
    """
    groups = _grouped((group, reward > PASS_ABOVE) for group, reward in rewards)
    largest = max(map(len, groups.values()), default=0)
    powers = [1 << i for i in range(largest.bit_length())]
    return {
        k: fmean(
            pass_at_k(len(group), sum(group), k) for group in groups.values() if len(group) >= k
        )
        for k in dict.fromkeys([*powers, largest] if largest else [])
    }


def _prompts(part: EvalResults) -> list[Hashable]:
    """Return the prompt to which each reward of a data set belongs."""
    samples = flatten(part.get("samples") or [])
    rewards = part["rewards"]
    if len(samples) == len(rewards) and all(sample.group_index is not None for sample in samples):
        return [sample.group_index for sample in samples]
    n = int(part.get("n_samples_per_prompt") or 1)
    return [i // n for i in range(len(rewards))]


def known_reward(sample: Sample, key: str | None) -> float | None:
    """Return the reward of a sample as a number, or None if it has no reward or its verifier gave
    no result.
    """
    if sample.reward is None or sample.reward_timed_out:
        return None
    reward: Any = sample.reward
    if isinstance(reward, Mapping):
        reward = reward.get(key or "score")
    return float(reward) if isinstance(reward, int | float) else None


def rollout_rewards(samples: Sequence[Sample], key: str | None) -> list[tuple[Hashable, float]]:
    """Return the group and the reward of each rollout that has one. A fan-out has the mean reward
    of its samples.
    """
    rollouts: dict[Hashable, tuple[Hashable, list[float]]] = {}
    for sample, rollout in zip(samples, keys_of_rollouts(samples), strict=True):
        if (value := known_reward(sample, key)) is not None:
            rollouts.setdefault(rollout, (sample.group_index, []))[1].append(value)
    return [(group, mean_reward(values)) for group, values in rollouts.values()]


def _of_sources(samples: Sequence[Sample], key: str | None) -> Metrics:
    """Return the mean reward and the share of the samples of each ``metadata["source_name"]``."""
    sources = _grouped(
        (str(sample.metadata["source_name"]), known_reward(sample, key))
        for sample in samples
        if "source_name" in sample.metadata
    )
    metrics: Metrics = {}
    for name, rewards in sorted(sources.items()):
        metrics[f"source/{name}/share"] = len(rewards) / len(samples)
        known = [reward for reward in rewards if reward is not None]
        if known:
            metrics[f"source/{name}/raw_reward"] = fmean(known)
    return dict_add_prefix(metrics, "rollout/")


def _without_spread(rewards: Sequence[tuple[Hashable, float]]) -> Metrics:
    """Count the groups whose rewards are all equal, by that reward."""
    groups = _grouped(rewards).values()
    counts = Counter(round(group[0], 1) for group in groups if len(set(group)) == 1)
    return {str(reward): float(count) for reward, count in sorted(counts.items())}


def _multi_turn(samples: Sequence[Sample]) -> Metrics:
    metrics = _spread(
        "multi_turn/raw_response_length", [sample.response_length for sample in samples]
    )
    metrics.update(
        _spread(
            "multi_turn/wo_obs_response_length",
            [sample.effective_response_length for sample in samples],
        )
    )
    rounds = [
        float(sample.metadata["round_number"])
        for sample in samples
        if "round_number" in sample.metadata
    ]
    prefix = "multi_turn/multi_turn_metric/round_number_"
    return metrics | dict_add_prefix(compute_statistics(rounds), prefix)


def _speed(samples: Sequence[Sample], seconds: float, gpus: int) -> Metrics:
    tokens = [sample.response_length for sample in samples]
    trained = [sample.effective_response_length for sample in samples]
    waits = [sample.non_generation_time for sample in samples]
    metrics: Metrics = {}
    if gpus:  # 0 if the engines are external, or if there are none
        metrics["perf/tokens_per_gpu_per_sec"] = sum(tokens) / seconds / gpus
        metrics["perf/effective_tokens_per_gpu_per_sec"] = sum(trained) / seconds / gpus
    if samples:
        metrics["perf/longest_sample_tokens_per_sec"] = max(tokens) / seconds
        metrics["perf/longest_effective_sample_tokens_per_sec"] = max(trained) / seconds
    if any(waits):
        metrics.update(_spread("perf/non_generation_time", waits))
        rates = [
            n / (seconds - wait) for n, wait in zip(tokens, waits, strict=True) if wait < seconds
        ]
        if rates:
            metrics["perf/longest_sample_tokens_per_sec_without_non_generation"] = max(rates)
    return metrics


def _grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, in the order of the first pairs."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _spread(name: str, values: Sequence[float]) -> Metrics:
    return dict_add_prefix(compute_statistics(values), f"{name}/")


def is_untrainable(sample: Sample) -> bool:
    """Whether a sample cannot be trained, because its generation or its reward failed, or it has no
    trained token.
    """
    return (
        sample.status is Sample.Status.FAILED
        or sample.remove_sample
        or not sample.effective_response_length
    )


def all_failed(samples: Sequence[Sample]) -> str | None:
    """Explain that no sample of a rollout can be trained; None if one can."""
    if not all(map(is_untrainable, samples)):
        return None
    if not samples:
        return "it has no samples, so this step trains nothing"
    first = samples[0]
    reasons = [
        s.metadata[key] for s in samples for key in (FAILURE_KEY, "error") if key in s.metadata
    ]
    why = (
        f"the first error: {reasons[0]}"
        if reasons
        else f"the first has the status {first.status.value}"
    )
    what = (
        f"all {len(samples)} samples failed or have no token to train, so this step trains nothing"
    )
    return f"{what}; {why}, and {first.response_length} response tokens. See the folder samples"


def compute_metrics_from_samples(args: ObservabilityConfig, samples: Sequence[Sample]) -> Metrics:
    """Return :func:`sample_metrics` with the flags of the run, for users' logging functions."""
    return sample_metrics(samples, args.log_reward_category)


@dataclass
class Counts:
    """Counters of one rollout.

    Attributes:
        dropped: Groups that the filter dropped, by reason.
        replaced: Groups that were dropped because their verifier gave no result.
        timed_out: Samples without a reward because their verifier timed out.
        abstained: Samples without a reward because the user's function returned None.
        failed: Samples without a reward for another reason, also those of ``raised``.
        raised: Samples whose reward function raised an exception.
        surplus: Finished groups that the rollout did not need.
        aborted: Unfinished groups that the rollout did not need.
        lost: Groups that were returned to a data source without a buffer.
        tokens: Response tokens.
        rewards: Rollouts with a numeric reward.
        reward_sum: The sum of these rewards.
    """

    dropped: Counter[str] = field(default_factory=Counter)
    replaced: int = 0
    timed_out: int = 0
    abstained: int = 0
    failed: int = 0
    raised: int = 0
    surplus: int = 0
    aborted: int = 0
    lost: int = 0
    tokens: int = 0
    rewards: int = 0
    reward_sum: float = 0.0

    def add(self, samples: list[Sample], reward_key: str | None) -> None:
        """Count the samples of a finished group."""
        for sample in samples:
            self.tokens += sample.response_length
            if status := failure(sample):
                self.timed_out += status == "timeout"
                self.abstained += status == ABSTAINED
                self.raised += status == RAISED
                # prompts that are too long are counted with the dropped groups
                self.failed += status not in ("timeout", ABSTAINED, TOO_LONG)
        rewards = rollout_rewards(samples, reward_key)
        self.rewards += len(rewards)
        self.reward_sum += sum(reward for _, reward in rewards)

    def numbers(self) -> dict[str, float]:
        """Return the numbers for the progress line in the terminal."""
        return {
            "tokens": self.tokens,
            **({"reward": self.reward_sum / self.rewards} if self.rewards else {}),
        }

    def metrics(self) -> dict[str, float]:
        metrics = {
            f"rollout/dynamic_filter/drop_{reason}": float(n)
            for reason, n in sorted(self.dropped.items())
        }
        counts = {
            "reward_timeout": self.timed_out,
            "reward_error": self.failed,
            "replaced_group": self.replaced,
            "reward_abstained": self.abstained,
            "surplus_group": self.surplus,
            "aborted_group": self.aborted,
            "lost_group": self.lost,
        }
        return metrics | {f"rollout/{name}_count": float(count) for name, count in counts.items()}

    def drop_report(self) -> str:
        """Describe why groups were not accepted, in parentheses; empty if there are none."""
        parts = [f"{n} dropped as {reason}" for reason, n in self.dropped.most_common()]
        if self.replaced:
            parts.append(f"{self.replaced} replaced, because their verifier gave no result")
        return f" ({'; '.join(parts)})" if parts else ""
