"""The work of a training rank on its part of a rollout, for any backend."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from slime.backends.advantages import AdvantageSettings, compute_advantages
from slime.backends.base import ModelTag, TrainBackend
from slime.backends.loss import divide_by_weights
from slime.config.args import Args
from slime.config.hooks import load_function
from slime.data.fields import BY_NAME, FIELDS, RankBatch, TrainData
from slime.data.rewards import PASS_ABOVE, shares_in_rollouts
from slime.observability import progress
from slime.observability.profiler import Profiler
from slime.observability.progress import Timers

METRICS = tuple(field.name for field in FIELDS if field.metric)
_REWARDS = ("rewards", "raw_reward")


class PhaseTimer:
    """Measures wall-clock seconds per named phase, and makes a profile if requested.

    Args:
        timers: Gets each phase as well, for the trace of the rollout.
    """

    def __init__(self, profiler: Profiler | None = None, timers: Timers | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.profiler = profiler
        self.timers = timers

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        progress.report(name.replace("_", " "))
        start = time.perf_counter()
        with self.profiler.phase(name) if self.profiler else nullcontext():
            yield
        seconds = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if self.timers is not None:
            self.timers.add(name, seconds)


def train_on_rollout(
    backend: TrainBackend,
    args: Args,
    batch: RankBatch,
    profiler: Profiler | None = None,
    timers: Timers | None = None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Compute log-probs and advantages, and run all optimizer steps of one rollout.

    All ranks must call this together, each with its own batch. These entries are added to the
    batch, unless it has them already: ``ref_log_probs``, ``old_log_probs`` (if they are
    recomputed), ``old_values`` (of the critic, from before the update), ``kl``, ``advantages`` and
    ``returns``.

    Returns:
        The metrics and the seconds per phase. Metrics ``train/…`` and ``train/critic-…`` are means
        over the optimizer steps of the rollout, ``rollout/…`` are means over its samples. They are
        equal on all ranks.

    Raises:
        ValueError: The batch lacks an entry that the flags need. The message names both.
        NonFiniteError: The loss or gradient of a step is not finite.
    """
    timer = PhaseTimer(profiler, timers)
    critic = backend.role == "critic"
    if args.reset_optimizer_states:
        backend.reset_optimizer()
    # Forward passes of the other models and of the old policy, each only if the loss needs it.
    score(backend, batch, timer)
    if args.use_critic and batch.get("old_values") is None:
        raise ValueError(
            f"--advantage-estimator {args.advantage_estimator} needs the critic's values in "
            "the actor's batch"
        )
    # Advantages are those of the whole rollout, so they come before its division into steps.
    with timer.phase("data_preprocess"):
        settings = AdvantageSettings.from_args(args)
        compute_advantages(settings.for_critic() if critic else settings, batch, backend.reduce)
        if args.rollout_data_postprocess_path and not critic:
            with batch.lent_to(args.rollout_data_postprocess_path) as view:
                load_function(args.rollout_data_postprocess_path)(
                    args, batch.get("rollout_id"), view
                )
    # Optimizer steps. The metrics of a step are equal on all ranks, so their mean is, too.
    steps = len(batch["num_microbatches"])
    name = f"{backend.role}_train"
    with timer.phase(name):
        results = []
        for step in range(steps):
            progress.report(name.replace("_", " "), step, steps)
            results.append(backend.train_step(batch, step))
    prefix = "train/critic-" if critic else "train/"
    metrics = {
        prefix + key: value for key, value in divide_by_weights(_mean_over_steps(results)).items()
    }
    if not critic:
        metrics |= rollout_metrics(backend, batch)
        if args.log_correct_samples:
            metrics |= correct_sample_metrics(backend, batch)
        tokens = backend.reduce.total([float(sum(batch["total_lengths"]))])[0]
        metrics["perf/actor_train_tok_per_s"] = tokens / max(timer.seconds[name], 1e-9)
    return metrics, timer.seconds


def score_rollout(
    backend: TrainBackend,
    batch: RankBatch,
    profiler: Profiler | None = None,
    timers: Timers | None = None,
) -> tuple[TrainData, dict[str, float]]:
    """Run the forward passes that come before the first optimizer step.

    With ``--kl-coef``, the critic needs the actor's log-probs for its returns, and it trains before
    the actor. If it has GPUs of its own, the actor trains at the same time, and needs its values
    before. All ranks must call this together.

    Returns:
        The entries that were added to the batch, and the seconds per phase.
        :func:`train_on_rollout` does not compute these entries again if its batch has them.
    """
    timer = PhaseTimer(profiler, timers)
    before = {*batch}
    score(backend, batch, timer)
    return {name: entry for name, entry in batch.items() if name not in before}, timer.seconds


def score(backend: TrainBackend, batch: RankBatch, timer: PhaseTimer) -> None:
    """Run the forward passes before the first optimizer step, each only if it is needed."""
    needs = backend.needs
    if backend.role == "critic":
        if batch.get("old_values") is None:
            with timer.phase("values"):
                # Computed before any update: they are the baseline of the advantages, and the value
                # loss clips around them.
                batch["old_values"] = backend.values(batch)
        return
    if needs.ref_log_probs and batch.get("ref_log_probs") is None:
        with timer.phase("ref_log_probs"):
            batch["ref_log_probs"] = backend.log_probs(batch, "ref")["log_probs"]
    if needs.teacher_log_probs and batch.get("teacher_log_probs") is None:
        with timer.phase("teacher_log_probs"):
            batch["teacher_log_probs"] = backend.log_probs(batch, "teacher")["log_probs"]
    tag: ModelTag = "old_actor" if needs.old_actor else "actor"
    recompute = needs.recomputes_old_log_probs(batch) and batch.get("old_log_probs") is None
    if recompute or (needs.rollout_entropy and batch.get("entropy") is None):
        with timer.phase("log_probs"):
            scores = backend.log_probs(batch, tag, with_entropy=needs.rollout_entropy)
            if "entropy" in scores:
                batch["entropy"] = scores["entropy"]
            if recompute:
                batch["old_log_probs"] = scores["log_probs"]
    if needs.squared_probs and batch.get("squared_probs") is None:
        with timer.phase("log_probs"):
            # At half the temperature, a token of the logit z has log π' = 2z − log Σ exp(2z), and
            # log Σπ² = log Σ exp(2z) − 2 log Σ exp(z).
            sharp = backend.log_probs(batch, tag, temperature=needs.temperature / 2)["log_probs"]
            old = batch.get("old_log_probs") or backend.log_probs(batch, tag)["log_probs"]
            batch["squared_probs"] = [(2 * p - q).exp() for p, q in zip(old, sharp, strict=True)]


def _mean_over_steps(results: list[dict[str, float]]) -> dict[str, float]:
    names = {name: None for result in results for name in result}  # in the order first seen
    present = {name: [result[name] for result in results if name in result] for name in names}
    return {name: _combined(name, values) for name, values in present.items()}


def _combined(name: str, values: list[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    return values[-1] if name.startswith("lr-") else sum(values) / len(values)


def rollout_metrics(backend: TrainBackend, batch: RankBatch) -> dict[str, float]:
    """Return ``rollout/<entry>``, the mean over the samples of all ranks. For a per-token entry it
    is the mean of the samples' masked means, for a reward the mean over rollouts."""
    return _means(backend, batch, METRICS, [True] * len(batch["tokens"]), "rollout/")


def correct_sample_metrics(backend: TrainBackend, batch: RankBatch) -> dict[str, float]:
    """Return ``rollout/correct-<entry>`` for the samples whose raw reward counts as a pass, and
    their fraction.

    This is for ``--log-correct-samples``. If no sample is correct, there are no such entries.
    """
    chosen = [float(reward) > PASS_ABOVE for reward in batch["raw_reward"]]
    shares = _shares(batch)
    right = math.fsum(share for share, correct in zip(shares, chosen, strict=True) if correct)
    correct, count = backend.reduce.total([right, math.fsum(shares)])
    names = [
        name
        for name in METRICS
        if BY_NAME[name].per != "sample" or name in ("response_lengths", "truncated")
    ]
    means = _means(backend, batch, names, chosen, "rollout/correct-")
    return {"rollout/correct_ratio": correct / max(count, 1.0), **(means if correct else {})}


def _shares(batch: RankBatch) -> list[float]:
    shares: list[float] | None = batch.get("rollout_shares")
    raw = batch["raw_reward"]
    return (
        shares_in_rollouts(batch.get("rollout_ids") or range(len(raw)), raw)
        if shares is None
        else shares
    )


def _means(
    backend: TrainBackend,
    batch: RankBatch,
    keys: Sequence[str],
    chosen: Sequence[bool],
    prefix: str,
) -> dict[str, float]:
    # Sums of each entry over the samples of this rank, and by what they are divided: samples, or
    # rollouts for rewards.
    names = []
    numbers = []
    masks = [torch.as_tensor(mask) for mask in batch["loss_masks"]]
    for key in keys:
        if batch.get(key) is None:
            continue
        entries = [
            (x, mask) for x, mask, wanted in zip(batch[key], masks, chosen, strict=True) if wanted
        ]
        if key in _REWARDS:
            weights = [
                share for share, wanted in zip(_shares(batch), chosen, strict=True) if wanted
            ]
            # Where the share is 0, the raw reward is NaN: the verifier gave no result.
            values = [
                float(x) * share for (x, _), share in zip(entries, weights, strict=True) if share
            ]
        elif BY_NAME[key].per == "sample":
            values = [float(x) for x, _ in entries]
        else:
            tensors = ((torch.as_tensor(x), mask) for x, mask in entries if bool(mask.any()))
            values = [float(x[mask != 0].double().mean()) for x, mask in tensors]
        names.append(BY_NAME[key].public_name)
        # Sums and counts instead of means, because ranks have different numbers of samples. One
        # collective at the end reduces all metrics.
        numbers += [sum(values), math.fsum(weights) if key in _REWARDS else float(len(values))]
    totals = backend.reduce.total(numbers)
    return {
        f"{prefix}{name}": totals[2 * i] / max(totals[2 * i + 1], 1.0)
        for i, name in enumerate(names)
    }


def score_probe(backend: TrainBackend, tokens: Sequence[int]) -> list[float]:
    """Return the log-probs of all tokens except the first, at temperature 1, equal on all ranks.

    This is a collective operation.

    Args:
        tokens: At least two ids. Each rank computes the log-probs of all of them.
    """
    batch = RankBatch(
        {
            "tokens": [torch.tensor(list(tokens), dtype=torch.int64)],
            "total_lengths": [len(tokens)],
            "response_lengths": [len(tokens) - 1],
            "group_indices": [0],
            "micro_batch_indices": [[0]],
        }
    )
    return [float(x) for x in backend.log_probs(batch, "actor", temperature=1.0)["log_probs"][0]]
