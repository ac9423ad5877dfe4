"""Metrics of a rollout that a training rank computes from its batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from slime.backends.base import TrainBackend
from slime.data.fields import BY_NAME, FIELDS, RankBatch
from slime.data.rewards import PASS_ABOVE, shares_in_rollouts

METRICS = tuple(field.name for field in FIELDS if field.metric)
_REWARDS = ("rewards", "raw_reward")


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
