"""The implementation of ``slime.backends.base.TrainBackend`` for data-parallel training with
FSDP2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from slime.backends.base import Metrics, ModelTag
from slime.backends.collectives import DTYPES, DataParallelReduce, NamedTensor
from slime.backends.fsdp.checkpoint import FsdpState
from slime.backends.fsdp.experts import RoutingReplay
from slime.backends.fsdp.gradients import CastParameters, ShardGradients
from slime.backends.fsdp.hf_weights import (
    ModelFormat,
    iter_hf_weights,
    load_full_model,
    names_with_adapters,
    read_checkpoint,
    save_hf_checkpoint,
    save_scores_checkpoint,
)
from slime.backends.fsdp.lora import FsdpAdapter
from slime.backends.fsdp.model import build_scorer, checkpoint_names, from_first_rank
from slime.backends.fsdp.optimizer import ScheduledAdamW
from slime.backends.loss_inputs import Scores
from slime.backends.lr_schedule import LrSchedule
from slime.backends.micro_batches import MicroBatches, ResponseValues
from slime.backends.shared import SharedBackend
from slime.backends.token_budget import rehearsal_batch
from slime.backends.trainable import lora_settings
from slime.config.args import Args
from slime.config.layout import ParallelLayout
from slime.config.run import InitialWeights
from slime.data.fields import RankBatch
from slime.models.inputs import ModelInputs
from slime.models.loading import decoder_layers
from slime.models.scorer import PolicyScorer, ValueScorer
from slime.registry import find

Accumulated = tuple[Metrics, MicroBatches, MicroBatches]


class FsdpBackend(SharedBackend):
    """One rank of an actor or critic. All ranks must call every method together."""

    optimizer: ScheduledAdamW
    adapter: FsdpAdapter | None
    read_ahead = staticmethod(read_checkpoint)

    def __init__(
        self,
        args: Args,
        role: str,
        rank: int,
        world_size: int,
        device: torch.device,
        preloaded: PreTrainedModel | None = None,
    ) -> None:
        super().__init__(args, role, rank, world_size, device)
        # the number of ranks that share one replica of the model, see shard_mesh
        self.shard_size = args.fsdp_shard_size or world_size
        self._join_groups(ParallelLayout.from_args(args).cp)
        self.scorer, builder = build_scorer(args, role, device, world_size, preloaded)
        by_heads = args.context_parallel_kind == "ulysses"
        self.builder = replace(builder, context_group=self.context_group, by_heads=by_heads)
        model = self.scorer.hf if isinstance(self.scorer, PolicyScorer) else self.scorer.backbone
        self.replay: RoutingReplay | None = None
        if args.use_rollout_routing_replay and role == "actor":
            assert isinstance(model, PreTrainedModel)
            self.replay = RoutingReplay(decoder_layers(model))
        self.cast = self._cast_of(model)
        # The optimizer comes before the copies, which stay on the accelerator only beside it.
        self.named_parameters = named = checkpoint_names(self.scorer)
        schedule = LrSchedule.from_args(args, role)
        kind = find("optimizer", args.optimizer)
        self.optimizer = kind(named, args, schedule, self._over_shards)
        saved = set(self.scorer.state_dict())
        self.buffers = [
            (name.removeprefix("hf."), b)
            for name, b in self.scorer.named_buffers()
            if name in saved
        ]
        initial = InitialWeights.of(args, args.hf_checkpoint)
        self.adapter = None
        if (lora := lora_settings(args)) is not None:
            folder, codes = initial.hf_folder(), args.lora_base_quantization
            self.adapter = FsdpAdapter(folder, lora, model, named, self.shard_size, codes)
        self._make_copies(named, initial.path(megatron=False), dtype=DTYPES[args.train_dtype])
        # of the base, which no snapshot contains
        buffers = self.buffers if self.adapter is None else []
        if (loss := self.loss_settings.registered) is not None:
            buffers = buffers + loss.prepare(args, device)
        self.state = FsdpState(
            args,
            role,
            rank,
            world_size,
            self.bank,
            self.adapter,
            self.shard_size,
            buffers,
            self.optimizer,
        )

    def _join_groups(self, context_size: int) -> None:
        """Join the groups of ranks that have other samples, and with context parallelism of those
        that have other tokens of the same samples.
        """
        layout = ParallelLayout(world_size=self.world_size, cp=context_size)
        self.data_parallel_rank = layout.data_rank(self.rank)
        self.data_parallel_size = layout.dp
        self.context_group: ProcessGroup | None = None
        data = None
        if context_size > 1:
            mesh = init_device_mesh(
                self.device.type, (layout.dp, context_size), mesh_dim_names=("data", "context")
            )
            data = mesh.get_group("data")
            self.context_group = mesh.get_group("context")
        self.reduce = DataParallelReduce(layout.dp, self.device, data, self.context_group)
        self.share_reduce = DataParallelReduce(self.world_size, self.device)

    def _cast_of(self, model: nn.Module) -> CastParameters | ShardGradients | None:
        """Return what replaces FSDP's mixed precision on one rank, where FSDP is not applied, or
        adds its gradients on the CPU.
        """
        args = self.args
        away = self.device if args.fsdp_cpu_offload else None
        if self.world_size == 1 and (args.train_dtype != "float32" or away):
            assert isinstance(model, PreTrainedModel)
            layers = decoder_layers(model)
            keep = not args.fsdp_reshard_after_forward
            return CastParameters(self.scorer, DTYPES[args.train_dtype], layers, keep, away)
        return ShardGradients(list(self.scorer.parameters())) if away else None

    def _in_pass_dtype(self) -> AbstractContextManager[None]:
        """Let the model compute in ``--train-dtype`` within the context, in which its weights must
        not change.
        """
        return nullcontext() if self.cast is None else self.cast.in_use()

    def _replayed(self, batch: RankBatch) -> AbstractContextManager[None]:
        """Let the policy use the engine's experts within the context."""
        return nullcontext() if self.replay is None else self.replay.during(batch)

    def _over_shards(self, value: float) -> float:
        """Return the sum over the shards of one replica.

        It is computed by one collective over all ranks, so that it is the same number on each.
        Every shard is counted once per replica, which is corrected.
        """
        return self.share_reduce.total([value])[0] * self.shard_size / self.world_size

    def load_copy(self, tag: str, path: str) -> None:
        """Load a copy. Rank 0 reads the model, and every rank gets its shards, one tensor at a
        time.
        """
        alone = self.world_size == 1
        # the dtype of forward passes, because the copy is used for them only
        dtype = DTYPES[self.args.train_dtype]
        how = ModelFormat.of(self.args)
        model = load_full_model(path, how, empty=not alone and self.rank != 0, dtype=dtype)
        fetch = (lambda tensor: tensor) if alone else partial(from_first_rank, device=self.device)
        self._whole_bank.add(tag, dict(model.named_parameters()), fetch)

    # --- forward only ---------------------------------------------------------------------------

    def log_probs(
        self,
        batch: RankBatch,
        model: ModelTag = "actor",
        with_entropy: bool = False,
        temperature: float | None = None,
    ) -> dict[str, list[Tensor]]:
        """Compute log-probs (and entropy) of the responses of all samples with one of the copies of
        the weights.
        """
        divisor = self.args.rollout_temperature if temperature is None else temperature
        scorer = self.scorer
        assert isinstance(scorer, PolicyScorer), "a critic has no log-probs"
        names = ["log_probs", "entropy"] if with_entropy else ["log_probs"]
        # Other models choose their experts themselves.
        policy = model in ("actor", "old_actor")
        with self.using(model), self._replayed(batch) if policy else nullcontext():
            return self._score(
                batch, names, lambda inputs: scorer(inputs, divisor, with_entropy)[0]
            )

    def values(self, batch: RankBatch) -> list[Tensor]:
        """Compute the critic's values for the responses of all samples."""
        assert isinstance(self.scorer, ValueScorer), "only a critic has values"
        return self._score(batch, ["values"], lambda inputs: Scores(values=self.scorer(inputs)))[
            "values"
        ]

    @torch.no_grad()
    def _score(
        self, batch: RankBatch, names: list[str], forward: Callable[[ModelInputs], object]
    ) -> dict[str, list[Tensor]]:
        """Run ``forward`` on all micro-batches, and return its outputs with these names for every
        sample.
        """
        found = ResponseValues(batch, names, self.device)
        with self._in_pass_dtype():
            for indices in self.aligned(self.forward_packs(batch)):
                inputs = self._inputs(batch, indices)
                found.put(indices, inputs.response_index, forward(inputs))
        self._reshard()
        if self.context_group is not None:
            dist.all_reduce(found.flat, group=self.context_group)
        return found.by_sample()

    # --- training -------------------------------------------------------------------------------

    def train_step(self, batch: RankBatch, step: int) -> Metrics:
        """Run one optimizer step. Loss and gradient are sums over micro-batches and ranks.

        Raises:
            NonFiniteError: The loss or the gradient norm is not finite. The weights are unchanged.
        """
        self.optimizer.zero_grad()
        return self.update(batch, step, self.accumulate(batch, step))

    def update(
        self, batch: RankBatch, step: int, added: Accumulated, factor: float = 1.0
    ) -> Metrics:
        """Update the weights with the gradients of :meth:`accumulate` times ``factor``."""
        self.optimizer.unscale(factor)
        metrics = self.finish_step(added[0], batch, step, *added[1:])
        scale = self.optimizer.loss_scale
        return metrics if scale is None else metrics | scale.after_step(metrics)

    def accumulate(
        self,
        batch: RankBatch,
        step: int,
        log_probs: ResponseValues | None = None,
        shares: Metrics | None = None,
    ) -> Accumulated:
        """Add the gradients of all micro-batches of a step to those that are there.

        Args:
            log_probs: Gets the log-probs of the samples that were computed.
            shares: Those of other parts of the step, to which those of this one are added.

        Returns:
            The rank's shares of loss and metrics, and the scheduled and the computed micro-batches.
        """
        # All backward passes are queued before any number is read, so that the accelerator never
        # waits for the host.
        scheduled, trained = self.scheduled_and_trained(batch, step)
        parts = []
        micro_batches = self.aligned(trained)
        # Of another part, a rank may have had no samples, and so other metrics than this one.
        self._uneven |= shares is not None
        shares = {} if shares is None else shares
        with self._in_pass_dtype(), self._replayed(batch):
            for number, indices in enumerate(micro_batches, start=1):
                self.communicate_for(last=number == len(micro_batches))
                parts.append(self.backward_pass(batch, indices, step, log_probs))
        for part in parts:
            # waits for the accelerator, so it comes after all work is queued
            self.add_shares(shares, part)
        return shares, scheduled, trained

    def _skips(self, grad_norm: float) -> bool:
        scale = self.optimizer.loss_scale
        return scale is not None and scale.can_be_lowered and not math.isfinite(grad_norm)

    def communicate_for(self, last: bool) -> None:
        """Set the communication of FSDP for the next backward pass.

        Gradients are summed over replicas only after the ``last`` micro-batch of a step. Until
        then, each rank accumulates its shard of the gradients of its replica.
        """
        if not isinstance(self.scorer, FSDPModule):
            return
        # Without synchronization, the whole gradients stay on each rank. This needs fewer
        # reduce-scatters, but memory for all gradients.
        self.scorer.set_requires_gradient_sync(
            last or not self.args.fsdp_accumulate_unsharded_gradients
        )
        self.scorer.set_requires_all_reduce(last)
        self.scorer.set_reshard_after_backward(last or self.args.fsdp_reshard_after_forward)

    def backward_pass(
        self,
        batch: RankBatch,
        indices: list[int],
        step: int,
        log_probs: ResponseValues | None = None,
    ) -> dict[str, Tensor]:
        """Run forward and backward of one micro-batch. Without samples it is a dummy, because of
        the collectives.
        """
        inputs = self._inputs(batch, indices)
        scores = self.scores_of(inputs)
        loss, metrics = self.share_of_loss(
            batch, indices, step, scores, inputs.targets, inputs.response_index
        )
        if log_probs is not None:
            log_probs.put(indices, inputs.response_index, scores)
        scale = self.optimizer.loss_scale
        (loss if scale is None else loss * scale.value).backward()
        if self.cast is not None:
            self.cast.end_backward()
        return metrics

    def scores_of(self, inputs: ModelInputs) -> Scores:
        """Return all outputs of the model that the loss needs."""
        needs = self.needs
        if isinstance(self.scorer, ValueScorer):
            return Scores(values=self.scorer(inputs))
        scores, logits = self.scorer(
            inputs, needs.temperature, needs.entropy, needs.entropy_grad, needs.logits
        )
        return Scores(scores.log_probs, scores.entropy, logits)

    def rehearse(self, tokens: int) -> None:
        """See :meth:`TrainBackend.rehearse`."""
        context = 1 if self.context_group is None else self.context_group.size()
        vocab_size: int = self.builder.backbone.config.get_text_config().vocab_size  # type: ignore[union-attr,operator]
        batch = rehearsal_batch(tokens * context, vocab_size)
        with self._in_pass_dtype():
            for _ in range(2):  # in the second pass, the gradients of the first are in memory
                inputs = self._inputs(batch, list(range(len(batch["tokens"]))))
                (self.scores_of(inputs).trained.sum() * 0.0).backward()
                if self.cast is not None:
                    self.cast.end_backward()
        self.optimizer.zero_grad()

    # --- ranks in step --------------------------------------------------------------------------

    def _inputs(self, batch: RankBatch, indices: list[int]) -> ModelInputs:
        if indices:
            inputs = self.builder.from_batch(batch, indices)
        else:
            # The smallest possible sample, with one token to attend to and one to score. Only its
            # collectives matter.
            inputs = self.builder.build([torch.zeros(2, dtype=torch.long)], [1], [0], [None])
        if self.replay is not None:
            self.replay.prepare(indices, inputs)
        return inputs

    def _reshard(self) -> None:
        """Free the gathered weights, which FSDP's root and some layers keep after a forward.
        Without a backward they would not be updated."""
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # --- weights and state ----------------------------------------------------------------------

    def _weights(self, merge: bool) -> Iterator[NamedTensor]:
        assert isinstance(self.scorer, PolicyScorer)
        return iter_hf_weights(self.scorer.hf, DTYPES[self.args.train_dtype], merge, self.device)

    def _adapted_weights(self) -> frozenset[str]:
        assert isinstance(self.scorer, PolicyScorer)
        return names_with_adapters(self.scorer.hf)

    def _export(self, path: Path, writer: bool) -> None:
        args = self.args
        dtype = DTYPES[args.train_dtype]
        if isinstance(self.scorer, ValueScorer):
            model, head = self.scorer.backbone, self.scorer.value_head.weight
            assert isinstance(model, PreTrainedModel)
            save_scores_checkpoint(model, head, path, dtype, args.hf_checkpoint, writer)
            return
        save_hf_checkpoint(
            self.scorer.hf, path, dtype, args.hf_checkpoint, writer, args.save_hf_dtype
        )

    def clear_memory(self) -> None:
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def sleep(self, keep_weights: bool = False) -> None:
        self.clear_memory()
        weights = [p.detach() for _, p in self.named_parameters] + [b for _, b in self.buffers]
        self.offloader.sleep(
            [*weights, *self.optimizer.tensors().values()], weights if keep_weights else ()
        )
        self.clear_memory()
