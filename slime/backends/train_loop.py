"""The work of a training rank on its part of a rollout, for any backend."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from slime.backends import micro_batches as mb
from slime.backends.advantages import (
    AdvantageSettings,
    compute_advantages,
    correct_sample_metrics,
    rollout_metrics,
)
from slime.backends.base import Metrics, ModelTag, TrainBackend
from slime.backends.loss import divide_by_weights, is_max_metric
from slime.config.hooks import load_function
from slime.data.fields import LOSS_FIELDS, RankBatch, TrainData
from slime.observability import progress
from slime.observability.profiler import Profiler
from slime.observability.progress import Timers

if TYPE_CHECKING:
    from slime.backends.fsdp.backend import FsdpBackend


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
    batch: RankBatch,
    profiler: Profiler | None = None,
    timers: Timers | None = None,
    parts: Parts | None = None,
) -> tuple[Metrics, dict[str, float]]:
    """Compute log-probs and advantages, and run all optimizer steps of one rollout.

    All ranks must call this together, each with its own batch. These entries are added to the
    batch, unless it has them already: ``ref_log_probs``, ``log_probs`` (if they are
    recomputed), ``values`` (of the critic, from before the update), ``kl``, ``advantages`` and
    ``returns``.

    Args:
        parts: The parts of the rollout that were trained while it was generated
            (``--train-during-rollout``).

    Returns:
        The metrics and the seconds per phase. Metrics ``train/…`` and ``train/critic-…`` are means
        over the optimizer steps of the rollout, ``rollout/…`` are means over its samples. They are
        equal on all ranks.

    Raises:
        ValueError: The batch lacks an entry that the flags need. The message names both.
        NonFiniteError: The loss or gradient of a step is not finite.
    """
    args = backend.args
    timer = PhaseTimer(profiler, timers)
    if args.reset_optimizer_states:
        backend.reset_optimizer()
    critic = backend.role == "critic"
    name = f"{backend.role}_train"
    # Optimizer steps. The metrics of a step are equal on all ranks, so their mean is, too.
    if args.train_during_rollout > 1:
        parts = Parts() if parts is None else parts
        early = float(sum(len(part["tokens"]) for part in parts.batches))
        results = [train_parts(cast("FsdpBackend", backend), batch, parts, timer)]
    else:
        prepare(backend, batch, timer)
        steps = len(batch["num_microbatches"])
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
    if args.train_during_rollout > 1:
        early, count = backend.reduce.total([early, float(len(batch["tokens"]))])
        metrics["perf/trained_during_rollout_ratio"] = early / count
    return metrics, timer.seconds


def prepare(backend: TrainBackend, batch: RankBatch, timer: PhaseTimer) -> None:
    """Compute all that the first optimizer step needs: log-probs and advantages."""
    args = backend.args
    critic = backend.role == "critic"
    # Forward passes of the other models and of the old policy, each only if the loss needs it.
    score(backend, batch, timer)
    if args.use_critic and batch.get("values") is None:
        raise ValueError(
            f"--advantage-estimator {args.advantage_estimator} needs the critic's values in "
            "the actor's batch"
        )
    # Advantages are those of the whole rollout, so they come before its division into steps.
    with timer.phase("data_preprocess"):
        settings = AdvantageSettings.from_args(args)
        compute_advantages(settings.for_critic() if critic else settings, batch, backend.reduce)
        if args.rollout_data_postprocess_path and not critic:
            postprocess = load_function(args.rollout_data_postprocess_path)
            postprocess(args, batch.get("rollout_id"), batch)


# --- a rollout that is trained in parts while it is generated (--train-during-rollout) -------------


@dataclass
class Parts:
    """What a rank keeps of the parts of a rollout that it has trained, until the last is there.

    Attributes:
        batches: Its batch of each part, with what was computed for it.
        shares: Sums of its shares of loss and metrics, as its gradients are sums.
        seconds: By phase.
    """

    batches: list[RankBatch] = field(default_factory=list)
    shares: Metrics = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def train_early_part(
    backend: FsdpBackend, batch: RankBatch, parts: Parts, timers: Timers | None = None
) -> None:
    """Add the gradients of a part while the rest of its rollout is generated, without an optimizer
    step.
    """
    timer = PhaseTimer(None, timers)
    timer.seconds = parts.seconds
    if not parts.batches:
        backend.optimizer.zero_grad()
    parts.batches.append(batch)
    # The number of tokens of the rollout is not known yet: a sum over tokens is divided by that of
    # rollouts, which is.
    batch["global_token_counts"] = batch["global_batch_sizes"]
    prepare(backend, batch, timer)
    with timer.phase("actor_train"):
        backend.accumulate(batch, 0, shares=parts.shares)


def train_parts(backend: FsdpBackend, batch: RankBatch, parts: Parts, timer: PhaseTimer) -> Metrics:
    """Train the parts of a rollout that were not trained early, and run its optimizer step.

    Args:
        batch: The whole rollout, with a part in place of each optimizer step. It gets what was
            computed for all parts, and is then the batch of one step.
        parts: Those that were trained early, to which the others are added.

    Returns:
        The metrics of the step.

    Raises:
        ValueError: Some parts have an entry for the loss that others lack.
    """
    early = len(parts.batches)
    if not early:
        backend.optimizer.zero_grad()
    timer.seconds |= parts.seconds
    sent = {*batch}
    rollouts = batch["global_batch_sizes"]
    tokens = sum(batch["global_token_counts"])
    batch["global_token_counts"] = rollouts
    parts.batches += [part_of(batch, i) for i in range(early, len(rollouts))]
    first = 0
    for number, part in enumerate(parts.batches):
        if number >= early:
            prepare(backend, part, timer)
        if different := (part.keys() ^ parts.batches[0].keys()) & LOSS_FIELDS.keys():
            raise ValueError(
                f"not all samples of the rollout have {', '.join(sorted(different))}, but some are "
                "trained already: leave --train-during-rollout out"
            )
        # The micro-batches of the whole rollout have positions in the whole batch.
        after = first + len(part["tokens"])
        assert part["sample_indices"] == batch["sample_indices"][first:after]
        for name in part.keys() - sent:
            batch.setdefault(name, [None] * len(batch["tokens"]))[first:after] = part[name]
        first = after
        if number >= early:
            with timer.phase("actor_train"):
                backend.accumulate(batch, number, shares=parts.shares)
    batch |= {
        "num_microbatches": [sum(batch["num_microbatches"])],
        "global_batch_sizes": rollouts[:1],
        "global_token_counts": [tokens],
    }
    factor = rollouts[0] / tokens if backend.loss_settings.per_token else 1.0
    shares = {n: x if is_max_metric(n) else x * factor for n, x in parts.shares.items()}
    with timer.phase("actor_train"):
        added = shares, *backend.scheduled_and_trained(batch, 0)
        return backend.update(batch, 0, added, factor)


def part_of(batch: RankBatch, number: int) -> RankBatch:
    """Return one part of a whole rollout as the batch of one step."""
    packs = mb.of_step(batch, number)
    # A schedule puts the samples of a part behind those of the parts before it.
    first, after = packs[0][0], packs[-1][-1] + 1
    part = RankBatch()
    for name, entry in batch.items():
        per_sample = isinstance(entry, list) and len(entry) == len(batch["tokens"])
        part[name] = entry[first:after] if per_sample else entry
    part.update(
        {
            "micro_batch_indices": [[i - first for i in pack] for pack in packs],
            "num_microbatches": [len(packs)],
            "global_batch_sizes": batch["global_batch_sizes"][:1],
            "global_token_counts": batch["global_token_counts"][:1],
        }
    )
    return part


# --- forward passes -------------------------------------------------------------------------------


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
        if batch.get("values") is None:
            with timer.phase("values"):
                # Computed before any update: they are the baseline of the advantages, and the value
                # loss clips around them.
                batch["values"] = backend.values(batch)
        return
    if needs.ref_log_probs and batch.get("ref_log_probs") is None:
        with timer.phase("ref_log_probs"):
            batch["ref_log_probs"] = backend.log_probs(batch, "ref")["log_probs"]
    if needs.teacher_log_probs and batch.get("teacher_log_probs") is None:
        with timer.phase("teacher_log_probs"):
            batch["teacher_log_probs"] = backend.log_probs(batch, "teacher")["log_probs"]
    tag: ModelTag = "old_actor" if needs.old_actor else "actor"
    recompute = needs.recomputes_old_log_probs(batch) and batch.get("log_probs") is None
    if recompute or (needs.rollout_entropy and batch.get("entropy") is None):
        with timer.phase("log_probs"):
            scores = backend.log_probs(batch, tag, with_entropy=needs.rollout_entropy)
            if "entropy" in scores:
                batch["entropy"] = scores["entropy"]
            if recompute:
                batch["log_probs"] = scores["log_probs"]
    if needs.squared_probs and batch.get("squared_probs") is None:
        with timer.phase("log_probs"):
            # At half the temperature, a token of the logit z has log π' = 2z − log Σ exp(2z), and
            # log Σπ² = log Σ exp(2z) − 2 log Σ exp(z).
            sharp = backend.log_probs(batch, tag, temperature=needs.temperature / 2)["log_probs"]
            old = batch.get("log_probs") or backend.log_probs(batch, tag)["log_probs"]
            batch["squared_probs"] = [(2 * p - q).exp() for p, q in zip(old, sharp, strict=True)]


def _mean_over_steps(results: list[Metrics]) -> Metrics:
    names = {name: None for result in results for name in result}  # in the order first seen
    present = {name: [result[name] for result in results if name in result] for name in names}
    return {name: _combined(name, values) for name, values in present.items()}


def _combined(name: str, values: list[float]) -> float:
    if is_max_metric(name):
        return max(values)
    return values[-1] if name.startswith("lr-") else sum(values) / len(values)


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
