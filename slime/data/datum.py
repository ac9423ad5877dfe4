"""What :class:`slime.Session` trains on: a sequence of tokens, and numbers for its last tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slime.config.layout import ParallelLayout
from slime.data.convert import each_part
from slime.data.fields import TrainData, Wire
from slime.data.sample import Sample
from slime.data.schedule import PackingSettings

_NUMBERS = ("weights", "advantages", "log_probs")


@dataclass(frozen=True)
class Datum:
    """A sequence of tokens. Its numbers belong to its last tokens, one each: these are the tokens
    that are scored.

    Attributes:
        tokens: The ids of the whole sequence.
        weights: What cross-entropy multiplies each token's loss with, 1 by default. The other
            losses multiply the advantages with it; those of registered algorithms take only 0 and
            1, their mask.
        advantages: The advantages of the policy losses.
        log_probs: Those of the policy that sampled the tokens.
        group: Data of one group store their common beginning once in a micro-batch. None: nothing
            is shared.
    """

    tokens: Sequence[int]
    weights: Sequence[float] | None = None
    advantages: Sequence[float] | None = None
    log_probs: Sequence[float] | None = None
    group: int | None = None

    @classmethod
    def of(cls, sample: Sample, advantage: float) -> Datum:
        """Return a sample of :meth:`slime.Session.sample`, with one advantage for its tokens."""
        length = sample.response_length
        return cls(
            sample.array("tokens").tolist(),  # type: ignore[union-attr]  # a response has tokens
            sample.loss_mask,
            [advantage] * length,
            sample.rollout_log_probs,
            sample.group_index,
        )

    @property
    def length(self) -> int:
        """The number of scored tokens."""
        return next(len(x) for name in _NUMBERS if (x := getattr(self, name)) is not None)

    def check(self, place: int) -> str | None:
        """Return what is wrong with the datum, of which ``place`` is the position; None if nothing
        is.
        """
        lengths = {name: len(x) for name in _NUMBERS if (x := getattr(self, name)) is not None}
        if not lengths:
            return f"datum {place} has none of {', '.join(_NUMBERS)}, so no token is scored"
        if len(set(lengths.values())) > 1:
            return f"datum {place} has numbers of different lengths: {lengths}"
        if not 0 < self.length < len(self.tokens):
            return (
                f"datum {place} has numbers for {self.length} of {len(self.tokens)} tokens: one "
                "to all but the first can be scored"
            )
        for name in lengths:
            if not all(math.isfinite(x) for x in getattr(self, name)):
                return f"datum {place} has {name} that are not finite"
        if min(self.tokens) < 0:
            return f"datum {place} has a negative token id"
        return None


def check_data(data: Sequence[Datum], needs: Sequence[str]) -> None:
    """Check all data.

    Args:
        needs: The numbers that the loss needs.

    Raises:
        ValueError: With up to eight problems, one on each line.
    """
    problems = [problem for i, datum in enumerate(data) if (problem := datum.check(i))]
    problems += [
        f"datum {i} has no {name}, which the loss needs"
        for i, datum in enumerate(data)
        for name in needs
        if getattr(datum, name) is None
    ]
    if not data:
        problems = ["there are no data"]
    if problems:
        raise ValueError("\n".join(problems[:8]))


def parts_of_data(
    settings: PackingSettings,
    layout: ParallelLayout,
    data: Sequence[Datum],
    *,
    masked: bool,
    divisor: float | None = None,
) -> Iterator[Wire]:
    """Yield the part of each data-parallel rank, whose one step has all data.

    Args:
        masked: Whether the weights are masks. Otherwise they are multiplied into the advantages, or
            stand in their place.
        divisor: By what the loss divides its sums; None for the number of data (or of tokens).

    Raises:
        ValueError: A weight that must be a mask is neither 0 nor 1.
    """
    ones: list[np.ndarray] = [np.ones(datum.length, np.float32) for datum in data]
    weights = [
        one if datum.weights is None else np.asarray(datum.weights, np.float32)
        for one, datum in zip(ones, data, strict=True)
    ]
    if masked and not all(np.isin(x, (0, 1)).all() for x in weights):
        raise ValueError("the weights of this loss are a mask: each must be 0 or 1")
    masks = weights if masked else ones
    factors = ones if masked else weights
    batch: TrainData = {
        "tokens": [np.asarray(datum.tokens, np.int32) for datum in data],
        "response_lengths": [datum.length for datum in data],
        "loss_masks": masks,
        "rollout_mask_sums": [float(np.sum(mask)) for mask in masks],
        "rollout_ids": list(range(len(data))),
        # a datum without a group shares nothing with others
        "group_indices": [
            -1 - i if datum.group is None else datum.group for i, datum in enumerate(data)
        ],
        "sample_indices": list(range(len(data))),
        "advantages": [
            factor
            if datum.advantages is None
            else np.asarray(datum.advantages, np.float32) * factor
            for factor, datum in zip(factors, data, strict=True)
        ],
    }
    if all(datum.log_probs is not None for datum in data):
        batch["rollout_log_probs"] = [datum.log_probs for datum in data]
    one_step = replace(settings, global_batch_size=len(data), steps=0)
    for part in each_part(one_step, batch, layout):
        if divisor is not None:
            part |= {"global_batch_sizes": [divisor], "global_token_counts": [divisor]}
        yield {**part, "rollout_id": 0}
