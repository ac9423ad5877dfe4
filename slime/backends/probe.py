"""The trainer's log-probs of a fixed token sequence, for the audit after a weight sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from slime.data.fields import RankBatch

if TYPE_CHECKING:
    from slime.backends.base import TrainBackend


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
