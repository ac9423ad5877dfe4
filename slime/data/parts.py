"""The parts of a rollout with ``--train-during-rollout``, which are trained while the rest is
generated.

A part is a number of groups in the order in which they finished. All parts together are one
optimizer step. Which groups a part has depends only on that order and not on when the trainer asks
for it, so a deterministic run is repeated bit for bit. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from slime.config.batch import BatchConfig

T = TypeVar("T")


def cut(groups: Sequence[T], batch: BatchConfig, ranks: int) -> list[Sequence[T]]:
    """Divide groups into at most ``--train-during-rollout`` parts of equal size; the last part has
    the rest, and is no smaller than the others.

    Args:
        groups: Those of a whole rollout, or the first of them.
        ranks: The data-parallel size. Every rank needs a sample of each part.
    """
    count = batch.train_during_rollout
    size = max(batch.rollout_batch_size // count, math.ceil(ranks / batch.n_samples_per_prompt))
    last = min(max(len(groups) // size, 1), count) - 1
    return [*(groups[i * size : (i + 1) * size] for i in range(last)), groups[last * size :]]


def ready(groups: Sequence[T], batch: BatchConfig, ranks: int, number: int) -> list[T]:
    """Return part ``number`` of a rollout of which only these groups are finished; nothing if it
    lacks some, or is the last one.
    """
    whole = cut(range(batch.rollout_batch_size), batch, ranks)
    if number + 1 >= len(whole) or whole[number][-1] >= len(groups):
        return []
    return [groups[i] for i in whole[number]]
