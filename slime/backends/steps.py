"""What every backend does around an optimizer step: add up shares, check that they are finite, make metrics."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slime.backends import micro_batches as mb
from slime.backends.base import Metrics, RankBatch
from slime.backends.collectives import DataParallelReduce
from slime.backends.loss import is_max_metric, rescale_diagnostics, zero_advantage_groups_skippable


class NonFiniteError(FloatingPointError):
    """The loss or the gradient norm is nan or infinite; the weights were not changed."""


class StepAccounting:
    """Base class of the backends. All ranks call every method together."""

    args: Any
    role: str
    reduce: DataParallelReduce
    """Over ranks that hold other samples."""
    share_reduce: DataParallelReduce
    """Over all ranks that compute shares of the loss: with context parallelism, of other tokens too."""

    _uneven = False
    """Whether some rank had fewer micro-batches than another in the last pass."""

    def scheduled_and_trained(self, batch: RankBatch, step: int) -> tuple[mb.MicroBatches, mb.MicroBatches]:
        """The rank's micro-batches of a step, and those left without samples that cannot move the weights."""
        scheduled = mb.of_step(batch, step)
        skipping = self.role == "actor" and batch.get("advantages") is not None
        skipping = skipping and zero_advantage_groups_skippable(self.args)
        return scheduled, mb.without_zero_advantages(batch, scheduled) if skipping else scheduled

    def aligned(self, micro_batches: mb.MicroBatches, multiple: int = 1) -> mb.MicroBatches:
        """As many micro-batches as the rank with the most has (up to a multiple), empty ones at the end: forward and
        backward are collectives."""
        count = len(micro_batches)
        most, least = self.reduce.maximum([float(count), float(-count)])
        self._uneven = most != -least
        wanted = math.ceil(int(most) / multiple) * multiple
        return [*micro_batches, *([[]] * (wanted - count))]

    def add_shares(self, total: dict[str, float], shares: dict[str, Tensor]) -> None:
        """Fold one micro-batch's shares (scalars) into the step's."""
        if not shares:
            return
        values = torch.stack([x.detach().double().reshape(()) for x in shares.values()]).tolist()
        for name, value in zip(shares, values, strict=True):
            before = total.get(name)
            if before is None:
                total[name] = value
            else:
                total[name] = max(before, value) if is_max_metric(name) else before + value

    def step_metrics(
        self, shares: dict[str, float], batch: RankBatch, scheduled: mb.MicroBatches, trained: mb.MicroBatches
    ) -> Metrics:
        """The step's values over all ranks."""
        metrics = self.share_reduce.metrics(shares, same_names=not self._uneven)
        counts = [float(sum(map(len, part))) for part in (scheduled, trained)]
        weights = [mb.weight(self.args, batch, part) for part in (scheduled, trained)]
        all_count, count, all_weight, weight = self.reduce.total([*counts, *weights])
        if count < all_count:
            metrics = {"loss": 0.0, "pg_loss": 0.0, "pg_clipfrac": 0.0} | metrics
            metrics = rescale_diagnostics(metrics, weight / all_weight if all_weight else 0.0)
        if self.role == "actor":
            metrics["skipped_sample_ratio"] = 1.0 - count / all_count if all_count else 0.0
        return metrics

    def require_finite(self, value: float, what: str, batch: RankBatch, step: int, done: int) -> None:
        """The same verdict on every rank, so that none waits for one that raised.

        Args:
            done: optimizer steps taken so far.
        """
        everyones = self.share_reduce.each(value)
        bad = [rank for rank, x in enumerate(everyones) if not math.isfinite(x)]
        if bad:
            raise NonFiniteError(
                f"{self.role}: {what} is {everyones[bad[0]]} on rank {', '.join(map(str, bad))} in optimizer step "
                f"{done} (step {step} of rollout {batch.get('rollout_id')}); weights are unchanged. "
                "Lower --lr or --clip-grad, or look at the samples of that rollout (--save-debug-rollout-data)"
            )


def complete(key: str, values: list[Tensor | None]) -> list[Tensor]:
    """Every sample's value.

    Raises:
        ValueError: some sample of the batch is in no micro-batch.
    """
    missing = [i for i, value in enumerate(values) if value is None]
    if missing:
        raise ValueError(f"{key}: samples {missing[:8]} of the rank batch are in no micro-batch")
    return [value for value in values if value is not None]
