"""The implementation of ``slime.backends.base.TrainBackend`` for training with megatron-core."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.backends.base import Metrics, ModelTag
from slime.backends.collectives import DTYPES, DataParallelReduce
from slime.backends.loss_inputs import Scores
from slime.backends.micro_batches import MicroBatches, ResponseValues
from slime.backends.shared import SharedBackend
from slime.backends.token_budget import rehearsal_batch
from slime.config.args import Args
from slime.config.hooks import load_function
from slime.config.layout import ParallelLayout
from slime.data.fields import RankBatch
from slime.models.fused import fuse
from slime.models.shards import resolve_folder
from slime.models.stored import write_tensors
from slime.plugins.megatron import groups
from slime.plugins.megatron.checkpoint import MegatronState
from slime.plugins.megatron.core import MegatronError, require_cuda
from slime.plugins.megatron.lora import MegatronAdapter
from slime.plugins.megatron.maps.family import WITH_VISION
from slime.plugins.megatron.model import Scoring
from slime.plugins.megatron.optimizer import ScheduledOptimizer
from slime.plugins.megatron.routing import ENGINE, Mode
from slime.plugins.megatron.schedule import (
    Around,
    MicroBatch,
    OnScores,
    PackBuilder,
    no_loss,
    run_schedule,
    without_a_trace,
)
from slime.plugins.megatron.trained_model import TrainedModel
from slime.weights.hf_folder import (
    SCORE,
    ExportForm,
    HfFolder,
    MtpLayers,
    score_changes,
    write_side_files,
)

logger = logging.getLogger(__name__)


class MegatronBackend(SharedBackend):
    """One rank of an actor or critic. All ranks must call every method together.

    Log-probs and losses are computed on the last pipeline stage. The results are sent to the other
    stages, so that every rank returns the same.
    """

    optimizer: ScheduledOptimizer
    adapter: MegatronAdapter | None

    def __init__(
        self, args: Args, role: str, rank: int, world_size: int, device: torch.device
    ) -> None:
        require_cuda()
        super().__init__(args, role, rank, world_size, device)
        # Groups of ranks. The sums over samples and over shares of the loss need two of them.
        self.layout = ParallelLayout.from_args(args)
        if problems := self.layout.problems():
            raise MegatronError("; ".join(problems))
        groups.initialize(self.layout, args.seed, args.distributed_timeout_minutes)
        self.data_parallel_rank = self.layout.data_rank(rank)
        self.data_parallel_size = self.layout.dp
        data = mpu.get_data_parallel_group()
        context = groups.context_group()
        with_context = mpu.get_data_parallel_group(with_context_parallel=True)
        self.reduce = DataParallelReduce(data.size(), device, data, context)
        self.share_reduce = DataParallelReduce(with_context.size(), device, with_context)
        # The model with its weights, and what builds packs for it.
        if args.custom_megatron_init_path:
            load_function(args.custom_megatron_init_path)(args)
        fuse(bool(args.compile_layers))
        self.model = TrainedModel(args, role, self.layout, rank, device)
        self.chunks = self.model.chunks
        self.weights = self.model.weights
        self._around: Around | None = None
        """The context of each forward; None without routing replay."""
        self.builder = PackBuilder(
            device=device,
            context_group=context,
            pad_to_multiple=self.model.pad_multiple,
            share_prompts=self.packing.shares_prompts,
            with_sequences=self.model.has_state,
            chunk_size=args.log_probs_chunk_size,
            fused=device.type == "cuda" and bool(args.compile_layers),
        )
        # Optimizer, adapter, copies and saved state, each of which needs the ones before it.
        self.optimizer = ScheduledOptimizer(args, role, self.chunks)
        adapters = self.model.adapters
        initial = self.model.initial
        self.adapter = (
            None
            if adapters is None
            else MegatronAdapter(initial.hf_folder(), adapters, self.weights)
        )
        # Megatron's gradient buffers and its optimizer have pointers to the memory of the
        # parameters.
        self._make_copies(
            self.weights.tensors(), initial.path(megatron=True), may_swap_pointers=False
        )
        self.state = MegatronState(
            args, role, rank, world_size, self.bank, self.adapter, self.model, self.optimizer
        )

    def load_copy(self, tag: str, path: str) -> None:
        """Load a copy, which is another model of the same shape, through the parameters of the
        model.
        """
        with self._whole_bank.filling(tag):
            self.model.read_weights(path)

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
        assert self.role == "actor", "a critic has no log-probs"
        temperature = self.args.rollout_temperature if temperature is None else temperature
        names = ["log_probs", "entropy"] if with_entropy else ["log_probs"]
        if self.args.custom_megatron_before_log_prob_hook_path:
            hook = load_function(self.args.custom_megatron_before_log_prob_hook_path)
            hook(self.args, self.chunks, {"ref": "ref_", "teacher": "teacher_"}.get(model, ""))
        policy = model in ("actor", "old_actor")  # other models choose their experts themselves
        mode: Mode | None = (
            ("replay" if self.args.use_rollout_routing_replay else "record") if policy else None
        )
        self.finish_update()
        with self.using(model), self._routed(batch, mode):
            return self._score(
                batch, Scoring(temperature=temperature, with_entropy=with_entropy), names
            )

    def values(self, batch: RankBatch) -> list[Tensor]:
        """Compute the critic's values for the responses of all samples."""
        assert self.role == "critic", "only a critic has values"
        self.finish_update()
        return self._score(batch, Scoring(), ["values"])["values"]

    @torch.no_grad()
    def _score(
        self, batch: RankBatch, scoring: Scoring, names: list[str]
    ) -> dict[str, list[Tensor]]:
        """Return fields of :class:`Scores` for every sample, float32 on the CPU, on every rank."""
        found = ResponseValues(batch, names, self.device)

        def keep(micro: MicroBatch, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
            found.put(micro.indices, micro.response_index, scores)
            return found.flat.new_zeros(()), {}

        packs = self.forward_packs(batch, self.layout.pp)
        self._run(batch, packs, scoring, keep, forward_only=True)
        if (context := groups.context_group()) is not None:
            dist.all_reduce(found.flat, group=context)
        groups.broadcast_from_last_stage([found.flat])
        return found.by_sample()

    # --- training -------------------------------------------------------------------------------

    def train_step(self, batch: RankBatch, step: int) -> Metrics:
        """Run one optimizer step. Loss and gradient are sums of shares over micro-batches and
        ranks.

        Raises:
            NonFiniteError: The loss or the gradient norm is not finite. The weights are unchanged.
        """
        args = self.args
        if args.custom_megatron_before_train_step_hook_path:
            hook = load_function(args.custom_megatron_before_train_step_hook_path)
            hook(
                args,
                batch.get("rollout_id"),
                step,
                self.chunks,
                self.optimizer.chained,
                self.optimizer.scheduler,
            )
        # Gradients are in Megatron's buffers, which its optimizer does not clear.
        scheduled, trained = self.scheduled_and_trained(batch, step)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.chained.zero_grad()
        scoring = self._scoring_of_training()

        def share(micro: MicroBatch, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
            targets = micro.scoring.targets
            return self.share_of_loss(
                batch, micro.indices, step, scores, targets, micro.response_index
            )

        # Only the last stage has losses. All stages need them, because each checks that they are
        # finite.
        shares: dict[str, float] = {}
        with self._routed(batch, "replay"):
            for metrics in self._run(batch, trained, scoring, share, forward_only=False):
                self.add_shares(shares, metrics)
        shares = groups.object_of_last_stage(shares)
        found = self.finish_step(shares, batch, step, scheduled, trained)
        # on no rank: Megatron gathers weights again only after a backward pass
        if not (trained or self._uneven):
            self.finish_update()
        return found

    def _scoring_of_training(self) -> Scoring:
        if self.model.valued:
            return Scoring()
        return Scoring(
            temperature=self.needs.temperature,
            with_entropy=self.needs.entropy,
            entropy_grad=self.needs.entropy_grad,
            with_logits=self.needs.logits,
        )

    def rehearse(self, tokens: int) -> None:
        """See :meth:`TrainBackend.rehearse`."""
        self.optimizer.prime()  # creates the moments, which otherwise the first step would create
        batch = rehearsal_batch(tokens * self.layout.cp, self.model.hf_config.vocab_size)
        everything = list(range(len(batch["tokens"])))
        # With the 1F1B schedule, a stage holds at most as many micro-batches as there are stages.
        # With twice as many micro-batches, every stage reaches this number and so its peak of
        # memory.
        with without_a_trace(self.model.config, self.chunks):
            self._run(
                batch,
                [everything] * (2 * self.layout.pp),
                self._scoring_of_training(),
                no_loss,
                False,
            )
        self.optimizer.chained.zero_grad()

    def _run(
        self,
        batch: RankBatch,
        micro_batches: MicroBatches,
        scoring: Scoring,
        on_scores: OnScores,
        forward_only: bool,
    ) -> list[dict[str, Tensor]]:
        """Run Megatron's schedule over this rank's micro-batches, and return the second results of
        ``on_scores``.
        """
        aligned = self.aligned(micro_batches, self.layout.vpp_group)
        micros = [self.builder.build(batch, indices, scoring) for indices in aligned]
        return (
            run_schedule(self.chunks, micros, on_scores, forward_only, self._around)
            if micros
            else []
        )

    @contextmanager
    def _routed(self, batch: RankBatch, mode: Mode | None) -> Iterator[None]:
        """Record or replay the choice of experts in passes within the context, if the flags require
        it.
        """
        if (
            self.model.routing is None
            or mode is None
            or (ENGINE not in batch and "rewards" not in batch)
        ):
            yield  # there is no replay, or the batch is a probe, which is not a sample of a rollout
            return
        with self.model.routing.during(batch, mode) as self._around:
            yield
        self._around = None

    # --- weights and state ----------------------------------------------------------------------

    def _weights(self, merge: bool) -> Iterator[tuple[str, Tensor]]:
        yield from self._trained_part(merge)
        # Engines get the vision part too: one that was asleep has lost it.
        for name, tensor in self._vision_part():
            yield name, tensor.to(self.device, DTYPES[self.args.train_dtype])

    def _vision_part(self) -> Iterator[tuple[str, Tensor]]:
        settings = self.model.settings
        if settings.get(WITH_VISION):
            yield from self.model.family.vision_part(settings, HfFolder(self.args.hf_checkpoint))

    def _trained_part(self, merge: bool) -> Iterator[tuple[str, Tensor]]:
        adapters = self.model.adapters
        return (
            self.weights.gather()
            if adapters is None or not merge
            else adapters.merge(self.weights.gather())
        )

    def _adapted_weights(self) -> frozenset[str]:
        adapters = self.model.adapters
        return (
            frozenset()
            if adapters is None
            else frozenset(f"{name}.weight" for name in adapters.names)
        )

    def _export(self, path: Path, writer: bool) -> None:
        source = resolve_folder(self.args.hf_checkpoint) if writer else None
        if self.model.valued:
            self._export_scores(path, source, writer)
            return
        mtp = MtpLayers(source)
        form = ExportForm(self.args.save_hf_dtype, source, writer)
        others = chain(self._vision_part(), mtp.tensors()) if writer else ()
        write_tensors(form.tensors(chain(self._trained_part(merge=True), others)), path, writer)
        if source is not None:
            write_side_files(source, path, mtp, form.config_changes())
            if mtp.notice:
                logger.warning("%s: %s", path, mtp.notice)

    def _export_scores(self, path: Path, source: Path | None, writer: bool) -> None:
        some = next(iter(self.weights.local.values()))
        head = self.weights.score_weight(some, self.model.hf_config.hidden_size)
        write_tensors(chain(self.weights.gather(), [(SCORE, head)]), path, writer)
        if source is not None:
            changes = score_changes(self.model.hf_config.model_type, head.dtype)
            write_side_files(source, path, None, changes)

    def finish_update(self) -> None:
        self.model.finish_gather()

    def clear_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def sleep(self, keep_weights: bool = False) -> None:
        """Move weights, moments and main parameters to pinned CPU memory, and free gradients."""
        self.finish_update()
        self.model.drop_gradients()
        named = (
            self.weights.tensors()
            if self.adapter is None
            else [*self.adapter.base, *self.adapter.trained]
        )
        weights = [x.detach() for _, x in named]
        self.offloader.sleep([*weights, *self.optimizer.tensors()], weights if keep_weights else ())
        self.clear_memory()

    def wake(self) -> None:
        super().wake()
        self.model.restore_gradients()
