"""The interface of a training backend. The batch that it trains on is described in
:mod:`slime.data.fields`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from slime.backends.collectives import DataParallelReduce
    from slime.backends.needs import TrainNeeds
    from slime.backends.saving import BackgroundSave
    from slime.checkpoint.files import FileEntry
    from slime.config.args import Args
    from slime.data.fields import RankBatch
    from slime.data.schedule import PackingSettings
    from slime.weights.settings import AdapterSource, AdapterSync

ModelTag = Literal["actor", "ref", "teacher", "old_actor", "rollout_actor"]
Metrics = dict[str, float]


class TrainBackend(Protocol):
    """One rank of a training job. All ranks must call every method together."""

    args: Args
    role: str
    """``actor`` or ``critic``."""
    packing: PackingSettings
    """For the packs of passes without a backward."""
    device: torch.device
    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    reduce: DataParallelReduce
    """Sums over the ranks that have other samples."""
    needs: TrainNeeds
    """The forward passes that the flags need."""
    saving: BackgroundSave | None
    """A save of ``--async-save`` that is not finished. The caller that finishes it sets this to
    None.
    """

    @property
    def moving_copies(self) -> set[str]:
        """Return the tags of the copies that change during a run, so that snapshots must contain
        them.
        """

    def log_probs(
        self,
        batch: RankBatch,
        model: ModelTag = "actor",
        with_entropy: bool = False,
        temperature: float | None = None,
    ) -> dict[str, list[torch.Tensor]]:
        """Compute log-probs in a forward pass.

        Args:
            temperature: The logits are divided by it; ``--rollout-temperature`` by default.

        Returns:
            ``{"log_probs": [...]}`` and, if requested, ``"entropy"``: float32 ``[response_length]``
            per sample, on the CPU.
        """

    def values(self, batch: RankBatch) -> list[torch.Tensor]:
        """Compute values in a forward pass of the critic: float32 ``[response_length]`` per sample,
        on the CPU.
        """

    def train_step(self, batch: RankBatch, step: int) -> Metrics:
        """Run forward, backward and optimizer for optimizer step ``step`` of this batch.

        The metrics are the same on every rank. A loss or gradient norm that is not finite is an
        error.
        """

    def rehearse(self, tokens: int) -> None:
        """Run forward and backward of micro-batches with ``tokens`` tokens on each GPU, without
        changing any state.

        They need as much memory as a training step with such micro-batches.
        """

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors with Hugging Face names, in the order of the checkpoint.

        This is a collective operation: every rank must exhaust the iterator.
        """

    @property
    def adapter_sync(self) -> AdapterSync | None:
        """Return what :meth:`named_weights` yields of an adapter (LoRA); None if the weights
        themselves are trained.
        """

    def adapter_source(self) -> AdapterSource | None:
        """Return the factors that :meth:`named_weights` yields last; None if it yields no
        factors.
        """

    def using(self, tag: ModelTag) -> AbstractContextManager[None]:
        """Let the model compute as one of the copies of the weights within the context, also for
        :meth:`named_weights`."""

    def copy_weights(self, source: ModelTag, target: ModelTag) -> None:
        """Refresh the reference or old actor from another copy."""

    def reset_optimizer(self) -> None:
        """Reset the moments of the optimizer (``--reset-optimizer-states``)."""

    def take_save_memory(self) -> None:
        """Allocate the memory for the copies of ``--async-save`` on a thread. Only the first call
        does this.

        It must be called after the first step, which creates the optimizer state.
        """

    def save(self, path: Path) -> list[FileEntry]:
        """Write this rank's shard of model, optimizer, scheduler and RNG below ``path``, and return
        its files.

        With ``--async-save`` only copies are made here; :attr:`saving` is then the save in the
        background.
        """

    def save_hf(self, path: Path) -> None:
        """Write the weights below ``path`` in Hugging Face format. This is a collective
        operation.
        """

    def load(self, path: Path) -> None:
        """Load what :meth:`save` wrote, possibly with another number of ranks."""

    def clear_memory(self) -> None:
        """Free gradients and the cached accelerator memory of the allocator."""

    def sleep(self, keep_weights: bool = False) -> None:
        """Release accelerator memory by moving tensors to pinned CPU memory. On the CPU this does
        nothing.

        Args:
            keep_weights: Release only optimizer state and gradients, so that :meth:`named_weights`
                still works. A second call without it releases the rest.
        """

    def wake(self) -> None: ...
