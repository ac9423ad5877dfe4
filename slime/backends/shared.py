"""The base class of both training backends: loss of a micro-batch, metrics of an optimizer step,
and saved state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends import micro_batches as mb
from slime.backends.bank import LIVE, CopySettings, WeightBank, keeps_copies_on_device, load_copies
from slime.backends.base import Metrics, ModelTag, TrainNeeds
from slime.backends.collectives import DTYPES, DataParallelReduce, NamedTensor
from slime.backends.loss import compute_loss, is_max_metric, rescale_diagnostics
from slime.backends.loss_inputs import LossSettings, Scores, TokenBatch
from slime.backends.offload import Offloader
from slime.backends.saving import BackgroundSave, SavedState
from slime.backends.trainable import TrainedAdapter
from slime.checkpoint.files import FileEntry
from slime.config.args import Args
from slime.data.fields import RankBatch
from slime.data.schedule import PackingSettings
from slime.models.peft_files import factor_names, named_factors
from slime.weights.settings import AdapterSource, AdapterSync

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKS_PER_STAGE = 4
"""The packs of a forward-only pass per pipeline stage. With so many, the pipeline is busy at least
80% of the time.
"""


class NonFiniteError(FloatingPointError):
    """The loss or the gradient norm is NaN or infinite. The weights were not changed."""


class StepOptimizer(Protocol):
    """The interface of a backend's optimizer that a step needs."""

    steps: int
    """The number of steps so far."""

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""

    def grad_norm(self) -> float:
        """Return the norm of the gradients of all ranks, the same number on each. This is a
        collective operation.
        """

    def reset(self) -> None: ...

    def step(self, norm: float) -> float:
        """Update the weights with clipped gradients, whose norm is ``norm``, and return the
        learning rate.
        """


class SharedBackend:
    """The base class of the backends. All ranks must call every method together."""

    optimizer: StepOptimizer
    adapter: TrainedAdapter | None
    """None if the weights themselves are trained."""
    bank: WeightBank
    """The copies of what is trained."""
    _whole_bank: WeightBank
    """The copies of whole models: with an adapter, those of its base."""
    state: SavedState
    reduce: DataParallelReduce
    """Sums over ranks that have other samples."""
    share_reduce: DataParallelReduce
    """Sums over all ranks that compute shares of the loss: with context parallelism, also of other
    tokens.
    """

    read_ahead: ClassVar[staticmethod[..., PreTrainedModel] | None] = None
    """Reads the checkpoint into the memory of the CPU, for the ``preloaded`` of the backend that is
    created then.
    """

    _uneven = False
    """Whether some ranks had fewer micro-batches than others in the last pass."""

    def __init__(
        self, args: Args, role: str, rank: int, world_size: int, device: torch.device
    ) -> None:
        self.args = args
        self.role = role
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.packing = PackingSettings.from_args(args)
        self.loss_settings = LossSettings.from_args(args)
        self.needs = TrainNeeds.from_args(args)
        self.offloader = Offloader()
        self.saving: BackgroundSave | None = None

    # --- copies of the weights ------------------------------------------------------------------

    def _make_copies(
        self,
        named: Sequence[NamedTensor],
        initial: str,
        *,
        dtype: torch.dtype | None = None,
        may_swap_pointers: bool = True,
    ) -> None:
        """Make the copies of the weights that the flags require. With an adapter, copies are those
        of the adapter.

        Args:
            named: The parameters of the model, or those on this rank.
            initial: The path of the initial weights.
            dtype, may_swap_pointers: As for :class:`WeightBank`.
        """
        args = self.args
        copies = CopySettings.of(
            self.needs,
            saved=args,
            gpus=args,
            ref_moves=bool(args.ref_update_interval),
            teacher=args.opd_teacher_load,
        )
        actor = self.role == "actor"

        def bank(tensors: Sequence[NamedTensor]) -> WeightBank:
            accelerated = self.device.type == "cuda"
            on_device = actor and accelerated and keeps_copies_on_device(copies, tensors)
            # The memory of the offloader is free while the model is on the accelerator.
            arena = self.offloader.host if accelerated else None
            return WeightBank(tensors, may_swap_pointers, dtype, on_device, arena)

        if self.adapter is None:
            self.bank = self._whole_bank = bank(named)
        else:
            self.bank, self._whole_bank = bank(self.adapter.trained), bank(self.adapter.base)
            self.adapter.copies = self._whole_bank
        if actor:
            load_copies(copies, self.bank, initial, self.load_copy, self.adapter is not None)

    def load_copy(self, tag: str, path: str) -> None:
        """Read the model at ``path`` into the copy ``tag`` of whole models. This is a collective
        operation.
        """
        raise NotImplementedError

    def using(self, tag: ModelTag) -> AbstractContextManager[None]:
        """See :meth:`TrainBackend.using`."""
        self.finish_update()
        return self.bank.using(tag) if self.adapter is None else self.adapter.using(tag, self.bank)

    # --- an optimizer step ----------------------------------------------------------------------

    def share_of_loss(
        self,
        batch: RankBatch,
        indices: list[int],
        step: int,
        scores: Scores,
        targets: Tensor,
        own: list[Tensor] | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the share of a micro-batch in the loss and metrics of optimizer step ``step``.

        Args:
            own: With context parallelism, the response tokens of each sample that this rank has.
        """
        if not indices:
            # A rank with fewer micro-batches than others takes part in their collectives with a
            # dummy. The loss of the dummy is 0, but has a gradient path through the whole model, so
            # that backward runs the same collectives.
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

    def scheduled_and_trained(
        self, batch: RankBatch, step: int
    ) -> tuple[mb.MicroBatches, mb.MicroBatches]:
        """Return the rank's micro-batches of a step, and the same without samples that cannot
        change the weights.
        """
        scheduled = mb.of_step(batch, step)
        skipping = (
            self.role == "actor"
            and batch.get("advantages") is not None
            and self.needs.skips_zero_advantages
        )
        return scheduled, mb.without_zero_advantages(batch, scheduled) if skipping else scheduled

    def forward_packs(self, batch: RankBatch, stages: int = 1) -> mb.MicroBatches:
        """Return the micro-batches of a forward-only pass, to which :meth:`aligned` must still be
        applied.

        This is a collective operation. Ranks run the passes in lock step, so each rank makes as
        many packs as the rank that needs the most. With several pipeline stages there are at least
        four times as many packs as stages, if training has as many: with fewer, larger packs,
        stages would be idle while the pipeline fills and drains.
        """
        training: mb.MicroBatches = batch["micro_batch_indices"]
        context = self.share_reduce.world_size // self.reduce.world_size
        at_least = min(len(training), PACKS_PER_STAGE * stages) if stages > 1 else 1
        packs = mb.forward_only(self.packing, batch, context, at_least)
        if packs is None:  # on every rank
            missing = sorted(
                set(range(len(batch["tokens"]))) - {i for indices in training for i in indices}
            )
            if missing:
                raise ValueError(
                    f"samples {missing[:8]} of the rank batch are in no micro-batch, so they "
                    "would not be scored"
                )
            return training
        # A rank that needs fewer packs divides its samples further instead of running dummies:
        # smaller packs need less memory, and dummies are wasted work.
        most = int(self.reduce.maximum([float(len(packs))])[0])
        if most > len(packs):
            packs = mb.forward_only(self.packing, batch, context, most) or []
        return packs

    def aligned(self, micro_batches: mb.MicroBatches, multiple: int = 1) -> mb.MicroBatches:
        """Add empty micro-batches, up to the number of the rank with the most, rounded up to a
        multiple.

        This is necessary because forward and backward are collective operations.
        """
        count = len(micro_batches)
        most, least = self.reduce.maximum([float(count), float(-count)])
        self._uneven = most != -least
        wanted = math.ceil(int(most) / multiple) * multiple
        return [*micro_batches, *([[]] * (wanted - count))]

    def add_shares(self, total: Metrics, shares: dict[str, Tensor]) -> None:
        """Add the shares of a micro-batch, which are scalars, to the totals of the step."""
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
        self,
        shares: Metrics,
        batch: RankBatch,
        scheduled: mb.MicroBatches,
        trained: mb.MicroBatches,
    ) -> Metrics:
        """Compute the metrics of the step over all ranks."""
        # Sums over ranks first: a rank may have had other samples, or none.
        same_names = not (self._uneven or self.loss_settings.metrics_vary)
        metrics = self.share_reduce.metrics(shares, same_names)
        counts = [float(sum(map(len, part))) for part in (scheduled, trained)]
        weights = [
            mb.weight(batch, part, self.args.calculate_per_token_loss)
            for part in (scheduled, trained)
        ]
        all_count, count, all_weight, weight = self.reduce.total([*counts, *weights])
        # Losses and metrics were divided by all rollouts of the step. This is right for the loss,
        # because skipped samples add 0. But diagnostics must be means over the samples that were
        # computed.
        if count < all_count:
            metrics = {"loss": 0.0, "pg_loss": 0.0, "pg_clipfrac": 0.0} | metrics
            metrics = rescale_diagnostics(metrics, weight / all_weight if all_weight else 0.0)
        if self.role == "actor":
            metrics["skipped_sample_ratio"] = 1.0 - count / all_count if all_count else 0.0
        return metrics

    def finish_step(
        self,
        shares: Metrics,
        batch: RankBatch,
        step: int,
        scheduled: mb.MicroBatches,
        trained: mb.MicroBatches,
    ) -> Metrics:
        """Update the weights with the gradients of this step, and return its metrics.

        Raises:
            NonFiniteError: The loss or the gradient norm is not finite. The weights are unchanged.
        """
        # All ranks agree on every decision here, because the step is a collective operation.
        self._require_finite(shares.get("loss", 0.0), "loss", batch, step)
        grad_norm = self.optimizer.grad_norm()
        skipped = self._skips(grad_norm)
        if not skipped:
            self._require_finite(grad_norm, "gradient norm", batch, step)
        metrics = self.step_metrics(shares, batch, scheduled, trained) | {
            **({} if skipped else {"grad_norm": grad_norm}),
            "lr-pg_0": self.optimizer.lr if skipped else self.optimizer.step(grad_norm),
            "global_batch_size": float(batch["global_batch_sizes"][step]),
        }
        if self.loss_settings.registered is not None:
            self.loss_settings.registered.after_step(self.bank.named)
        return metrics

    def _skips(self, grad_norm: float) -> bool:
        """Return whether the step is left out because of the norm, which is equal on all ranks."""
        return False

    def _require_finite(self, value: float, what: str, batch: RankBatch, step: int) -> None:
        """Raise the same error on every rank, so that no rank waits for one that raised an
        error.
        """
        everyones = self.share_reduce.each(value)
        bad = [rank for rank, x in enumerate(everyones) if not math.isfinite(x)]
        if bad:
            raise NonFiniteError(
                f"{self.role}: {what} is {everyones[bad[0]]} on rank {', '.join(map(str, bad))} "
                f"in optimizer step {self.optimizer.steps} (step {step} of rollout "
                f"{batch.get('rollout_id')}); weights are unchanged. Lower --lr or --clip-grad, "
                "or look at the samples of that rollout (--save-debug-rollout-data)"
            )

    # --- weights and state ----------------------------------------------------------------------

    @property
    def moving_copies(self) -> set[str]:
        """Return the tags of the copies that change during a run, so that snapshots must contain
        them.
        """
        return self.bank.moving

    def named_weights(self) -> Iterator[NamedTensor]:
        """Yield full tensors with the names of the checkpoint, in the dtype of forward passes.

        With ``--lora-sync adapter``, they are followed by the factors of the adapter with their
        names in PEFT's files. They may be the memory of the model.
        """
        assert self.role == "actor", "a critic's weights go to no engine"
        separate = self.adapter is not None and self.args.lora_sync == "adapter"
        self.finish_update()
        yield from self._weights(merge=not separate)
        if separate:
            yield from self._named_factors()

    def _weights(self, merge: bool) -> Iterator[NamedTensor]:
        """Yield the weights; with ``merge``, the adapter is added to them if there is one."""
        raise NotImplementedError

    def _named_factors(self) -> Iterator[NamedTensor]:
        """Yield the factors of the adapter with their names in PEFT's files."""
        assert self.adapter is not None
        self.finish_update()
        dtype = DTYPES[self.args.train_dtype]
        yield from (
            (name, factor.to(dtype))
            for name, factor in named_factors(self.adapter.factors()).items()
        )

    @property
    def adapter_sync(self) -> AdapterSync | None:
        """See :attr:`TrainBackend.adapter_sync`."""
        adapter = self.adapter
        if adapter is None or self.role != "actor":
            return None
        if self.args.lora_sync == "merged":
            return AdapterSync(self._adapted_weights(), None)
        layers = adapter.layer_names()
        return AdapterSync(
            frozenset(name for layer in layers for name in factor_names(layer)),
            adapter.config(layers),
        )

    def _adapted_weights(self) -> frozenset[str]:
        """Return the names in the checkpoint of the weights that have adapters."""
        raise NotImplementedError

    def adapter_source(self) -> AdapterSource | None:
        """See :meth:`TrainBackend.adapter_source`."""
        sent = self.adapter_sync
        return (
            None
            if sent is None or sent.config is None
            else AdapterSource(self._named_factors(), self._any_rank)
        )

    def save_hf(self, path: Path) -> None:
        """Write a Hugging Face folder of the current weights, or PEFT's files of the adapter
        (``--save-hf``).
        """
        assert self.role == "actor", "a critic is not a language model"
        self.finish_update()
        writer = self.rank == 0
        try:
            if self.adapter is not None and self.args.lora_export == "peft":
                self.adapter.save(Path(path), writer)
            else:
                self._export(Path(path), writer)
        finally:
            # also after an error of the writer, for which the other ranks would wait
            self.barrier()

    def _export(self, path: Path, writer: bool) -> None:
        """Write a Hugging Face folder of the current weights. This is a collective operation."""
        raise NotImplementedError

    def _any_rank(self, value: bool) -> bool:
        if self.world_size == 1:
            return value
        anywhere = torch.tensor(float(value), device=self.device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        return bool(anywhere)

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def finish_update(self) -> None:
        """Wait until the last update has reached the weights. It is called before they are read or
        replaced.
        """

    def copy_weights(self, source: ModelTag, target: ModelTag) -> None:
        """Make one copy equal to another. A target that does not exist yet is created."""
        self.finish_update()
        self.bank.copy(source, target)
        if target != LIVE:
            self.bank.moving.add(target)

    def reset_optimizer(self) -> None:
        self.optimizer.reset()

    def take_save_memory(self) -> None:
        self.state.take_memory()

    def save(self, path: Path) -> list[FileEntry]:
        self.finish_update()
        if self.saving is not None:
            # The last save must be finished, because its copies are in the memory that this save
            # uses.
            self.saving.finish(self.args.phase_timeout)
        write = self.state.writer(Path(path))
        if not self.args.async_save:
            return write()
        self.saving = BackgroundSave(write)
        return []

    def load(self, path: Path) -> None:
        self.finish_update()
        self.state.load(Path(path))

    def wake(self) -> None:
        self.offloader.wake()
