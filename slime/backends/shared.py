"""What both training backends share: attributes, the loss of a micro-batch, and the state that a run saves."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.bank import LIVE, WeightBank
from slime.backends.base import ModelTag
from slime.backends.loss import compute_loss
from slime.backends.loss_settings import LossSettings
from slime.backends.offload import Offloader
from slime.backends.saving import BackgroundSave, SavedState, in_background
from slime.backends.steps import StepAccounting
from slime.backends.token_batch import Scores, TokenBatch
from slime.checkpoint.files import FileEntry
from slime.config.args import Args
from slime.data.fields import RankBatch
from slime.data.schedule import PackingSettings


class SharedBackend(StepAccounting):
    """Base class of the backends. Every method is called on all ranks together."""

    bank: WeightBank
    state: SavedState

    def __init__(self, args: Args, role: str, rank: int, world_size: int, device: torch.device) -> None:
        self.args, self.role, self.device = args, role, device
        self.rank, self.world_size = rank, world_size
        self.packing = PackingSettings.from_args(args)
        self.loss_settings = LossSettings.from_args(args)
        self.offloader = Offloader()
        self.saving: BackgroundSave | None = None

    def share_of_loss(
        self, batch: RankBatch, indices: list[int], step: int, scores: Scores, targets: Tensor, own: list[Tensor] | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One micro-batch's share of the loss and the metrics of optimizer step ``step``.

        Args:
            own: with context parallelism, which response tokens of each sample are this rank's.
        """
        if not indices:
            # A rank with fewer micro-batches than the others takes part in their collectives with a dummy. Its loss
            # is 0, but with a gradient path through the whole model, so that backward runs the same collectives.
            return scores.trained.sum() * 0.0, {}
        tokens = TokenBatch.from_rank_batch(
            batch,
            indices,
            device=self.device,
            response_index=own,
            targets=None if scores.logits is None else targets,
            **scores._asdict(),
        )
        return compute_loss(
            self.loss_settings,
            tokens,
            num_rollouts=batch["global_batch_sizes"][step],
            num_tokens=batch["global_token_counts"][step],
            reduce=self.reduce,
        )

    @property
    def moving_copies(self) -> set[str]:
        """Copies of the weights that change during a run, and so belong in its snapshots."""
        return self.bank.moving

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def copy_weights(self, source: ModelTag, target: ModelTag) -> None:
        """Make one copy equal to another; a target that does not exist yet is made."""
        self.bank.copy(source, target)
        if target != LIVE:
            self.bank.moving.add(target)

    def take_save_memory(self) -> None:
        self.state.take_memory()

    def save(self, path: Path) -> list[FileEntry]:
        if self.saving is not None:
            # The memory that this save copies into still holds the copies of the last one.
            self.saving.finish(self.args.phase_timeout)
        write = self.state.writer(Path(path))
        if not self.args.async_save:
            return write()
        self.saving = in_background(write)
        return []

    def load(self, path: Path) -> None:
        self.state.load(Path(path))

    def wake(self) -> None:
        self.offloader.wake()
