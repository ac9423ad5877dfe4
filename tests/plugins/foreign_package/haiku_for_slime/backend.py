"""A training backend: FSDP that tells of each optimizer step."""

from __future__ import annotations

from slime.backends.base import Metrics
from slime.backends.fsdp.backend import FsdpBackend
from slime.data.fields import RankBatch


class Counted(FsdpBackend):
    """FSDP that prints the number of each optimizer step."""

    def train_step(self, batch: RankBatch, step: int) -> Metrics:
        print("counted step", step, flush=True)
        return super().train_step(batch, step)
