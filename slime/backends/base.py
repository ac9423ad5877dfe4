"""The interface of a training backend. The batch that it trains on is described in :mod:`slime.data.fields`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from slime.backends.collectives import DataParallelReduce
    from slime.backends.needs import TrainNeeds
    from slime.backends.saving import BackgroundSave
    from slime.checkpoint.files import FileEntry
    from slime.data.fields import RankBatch

ModelTag = Literal["actor", "ref", "teacher", "old_actor", "rollout_actor"]
Metrics = dict[str, float]


class TrainBackend(Protocol):
    """One rank of a training job. Every method is called on all ranks together."""

    role: str
    """``actor`` or ``critic``."""
    device: torch.device
    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    reduce: DataParallelReduce
    """Sums over the ranks that hold other samples."""
    needs: TrainNeeds
    """Which forward passes the flags need."""
    saving: BackgroundSave | None
    """A save of ``--async-save`` that is not finished; whoever finishes it sets this to None."""

    @property
    def moving_copies(self) -> set[str]:
        """Copies of the weights that change during a run, and so belong in its snapshots."""

    def log_probs(
        self, batch: RankBatch, model: ModelTag = "actor", with_entropy: bool = False, temperature: float | None = None
    ) -> dict[str, list[torch.Tensor]]:
        """Forward only. Returns ``{"log_probs": [...]}`` and, if asked, ``"entropy"``: float32
        ``[response_length]`` per sample, on the CPU. ``temperature`` divides the logits; default
        ``--rollout-temperature``."""

    def values(self, batch: RankBatch) -> list[torch.Tensor]:
        """Critic only: float32 ``[response_length]`` per sample, on the CPU."""

    def train_step(self, batch: RankBatch, step: int) -> Metrics:
        """Forward, backward and optimizer for optimizer step ``step`` of this batch.
        Metrics are the same on every rank. Raises on a non-finite loss or gradient norm."""

    def rehearse(self, tokens: int) -> None:
        """Forward and backward of micro-batches of ``tokens`` tokens on each GPU, which leave no trace: what they take
        of memory is what a training step of such micro-batches takes."""

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """HF-named full tensors in checkpoint order; a collective: every rank must exhaust it."""

    def copy_weights(self, source: ModelTag, target: ModelTag) -> None:
        """Refresh the reference or old actor from another copy."""

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments (``--reset-optimizer-states``)."""

    def take_save_memory(self) -> None:
        """Get the memory that ``--async-save`` copies into, on a thread, once; after the first step, which makes the
        optimizer's state."""

    def save(self, path: Path) -> list[FileEntry]:
        """Write this rank's shard of model, optimizer, scheduler and RNG below ``path``; returns its files. With
        ``--async-save`` only copies are made at once; :attr:`saving` is what is still to be written."""

    def save_hf(self, path: Path) -> None:
        """Write the weights below ``path`` in Hugging Face's format; a collective."""

    def load(self, path: Path) -> None:
        """Read what :meth:`save` wrote, also by another number of ranks."""

    def clear_memory(self) -> None:
        """Free gradients and the accelerator memory that the allocator keeps for the next step."""

    def sleep(self, keep_weights: bool = False) -> None:
        """Give accelerator memory back (copies to pinned CPU memory); a no-op on the CPU.

        ``keep_weights``: optimizer state and gradients only, so that :meth:`named_weights` still works; a second call
        without it gives the rest back."""

    def wake(self) -> None: ...
