"""What a training rank does with its part of a rollout, on any backend."""

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
from slime.data.fields import BY_NAME, FIELDS, RankBatch
from slime.observability import progress
from slime.observability.profiler import Profiler

PASS_ABOVE = 0.5  # as in the metrics of rollouts
METRICS = tuple(field.name for field in FIELDS if field.metric)


class PhaseTimer:
    """Wall seconds per named phase, and a profile where one is asked for."""

    def __init__(self, profiler: Profiler | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.profiler = profiler

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        progress.report(name.replace("_", " "))
        start = time.perf_counter()
        with self.profiler.phase(name) if self.profiler else nullcontext():
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def train_on_rollout(
    backend: TrainBackend, args: Args, batch: RankBatch, profiler: Profiler | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Score, estimate advantages, and take every optimizer step of one rollout.

    The batch is completed in place: ``ref_log_probs``, ``old_log_probs`` (where the flags need them recomputed),
    ``old_values`` (critic: its own, from before the update), ``kl``, ``advantages``, ``returns``.

    Args:
        backend: called on all ranks together, each with its own batch.

    Returns:
        metrics (``train/…`` or ``train/critic-…``: the mean over the rollout's optimizer steps;
        ``rollout/…``: means over its samples; equal on all ranks) and seconds per phase.

    Raises:
        ValueError: the batch lacks what the flags need; the message names both.
        NonFiniteError: the loss or gradient of a step is not finite.
    """
    timer = PhaseTimer(profiler)
    critic = backend.role == "critic"
    if args.reset_optimizer_states:
        backend.reset_optimizer()
    if critic:
        with timer.phase("values"):
            # Before any update: they are the baseline of the advantages, and the centre of the clip of the value loss.
            batch["old_values"] = backend.values(batch)
    else:
        _score(backend, batch, timer)
        if args.use_critic and batch.get("old_values") is None:
            raise ValueError(
                f"--advantage-estimator {args.advantage_estimator} needs the critic's values in the actor's batch"
            )
    with timer.phase("data_preprocess"):
        settings = AdvantageSettings.from_args(args)
        compute_advantages(settings.for_critic() if critic else settings, batch, backend.reduce)
        if args.rollout_data_postprocess_path and not critic:
            with batch.lent_to(args.rollout_data_postprocess_path) as view:
                load_function(args.rollout_data_postprocess_path)(args, batch.get("rollout_id"), view)
    steps = len(batch["num_microbatches"])
    name = f"{backend.role}_train"
    with timer.phase(name):
        results = []
        for step in range(steps):
            progress.report(name.replace("_", " "), step, steps)
            results.append(backend.train_step(batch, step))
    prefix = "train/critic-" if critic else "train/"
    metrics = {prefix + key: value for key, value in divide_by_weights(_mean_over_steps(results)).items()}
    if not critic:
        metrics |= rollout_metrics(backend, batch)
        if args.log_correct_samples:
            metrics |= correct_sample_metrics(backend, batch)
        tokens = backend.reduce.total([float(sum(batch["total_lengths"]))])[0]
        metrics["perf/actor_train_tok_per_s"] = tokens / max(timer.seconds[name], 1e-9)
    return metrics, timer.seconds


def _score(backend: TrainBackend, batch: RankBatch, timer: PhaseTimer) -> None:
    """The actor's forward passes before the first optimizer step, each only where it is needed."""
    needs = backend.needs
    if needs.ref_log_probs and batch.get("ref_log_probs") is None:
        with timer.phase("ref_log_probs"):
            batch["ref_log_probs"] = backend.log_probs(batch, "ref")["log_probs"]
    if needs.teacher_log_probs and batch.get("teacher_log_probs") is None:
        with timer.phase("teacher_log_probs"):
            batch["teacher_log_probs"] = backend.log_probs(batch, "teacher")["log_probs"]
    recompute = needs.recomputes_old_log_probs(batch) and batch.get("old_log_probs") is None
    if recompute or needs.rollout_entropy:
        with timer.phase("log_probs"):
            tag: ModelTag = "old_actor" if needs.old_actor else "actor"
            scores = backend.log_probs(batch, tag, with_entropy=needs.rollout_entropy)
            if "entropy" in scores:
                batch["entropy"] = scores["entropy"]
            if recompute:
                batch["old_log_probs"] = scores["log_probs"]


def _mean_over_steps(results: list[dict[str, float]]) -> dict[str, float]:
    names = {name: None for result in results for name in result}  # in the order first seen
    present = {name: [result[name] for result in results if name in result] for name in names}
    return {name: _combined(name, values) for name, values in present.items()}


def _combined(name: str, values: list[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    return values[-1] if name.startswith("lr-") else sum(values) / len(values)


def rollout_metrics(backend: TrainBackend, batch: RankBatch) -> dict[str, float]:
    """``rollout/<entry>``: the mean over all samples of all ranks; of a per-token entry, each sample's masked mean."""
    return _means(backend, batch, METRICS, [True] * len(batch["tokens"]), "rollout/")


def correct_sample_metrics(backend: TrainBackend, batch: RankBatch) -> dict[str, float]:
    """``rollout/correct-<entry>`` of the samples whose raw reward counts as a pass, and their share
    (``--log-correct-samples``); no entries where none is correct."""
    chosen = [float(reward) > PASS_ABOVE for reward in batch["raw_reward"]]
    known = sum(not math.isnan(reward) for reward in batch["raw_reward"])
    correct, count = backend.reduce.total([float(sum(chosen)), float(known)])
    names = [name for name in METRICS if BY_NAME[name].per != "sample" or name in ("response_lengths", "truncated")]
    means = _means(backend, batch, names, chosen, "rollout/correct-")
    return {"rollout/correct_ratio": correct / max(count, 1.0), **(means if correct else {})}


def _means(
    backend: TrainBackend, batch: RankBatch, keys: Sequence[str], chosen: Sequence[bool], prefix: str
) -> dict[str, float]:
    names, numbers = [], []
    masks = [torch.as_tensor(mask) for mask in batch["loss_masks"]]
    for key in keys:
        if batch.get(key) is None:
            continue
        entries = [(x, mask) for x, mask, wanted in zip(batch[key], masks, chosen, strict=True) if wanted]
        if BY_NAME[key].per == "sample":
            known = (float(x) for x, _ in entries)
            values = [x for x in known if not math.isnan(x)]  # no raw reward: its verifier gave no answer
        else:
            tensors = ((torch.as_tensor(x), mask) for x, mask in entries if bool(mask.any()))
            values = [float(x[mask != 0].double().mean()) for x, mask in tensors]
        names.append(BY_NAME[key].public_name)
        # Sums and counts instead of means: ranks hold different numbers of samples, and one collective at the end
        # serves all metrics.
        numbers += [sum(values), float(len(values))]
    totals = backend.reduce.total(numbers)
    return {f"{prefix}{name}": totals[2 * i] / max(totals[2 * i + 1], 1.0) for i, name in enumerate(names)}


def score_probe(backend: TrainBackend, tokens: Sequence[int]) -> list[float]:
    """Log-prob at temperature 1 of every token but the first; a collective, equal on all ranks.

    Args:
        tokens: at least two ids; each rank scores all of them.
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
