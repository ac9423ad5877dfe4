"""One rank of training with megatron-core: ``slime.backends.base.TrainBackend``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from slime.backends.bank import WeightBank, keeps_copies_on_device, load_copies
from slime.backends.base import Metrics, ModelTag
from slime.backends.collectives import DataParallelReduce
from slime.backends.loss import LossSettings, compute_loss
from slime.backends.megatron import groups, modules
from slime.backends.megatron.checkpoint import (
    load_training_state,
    load_weights,
    save_training_state,
    take_save_memory,
)
from slime.backends.megatron.config import ddp_config, transformer_config
from slime.backends.megatron.core import MegatronError
from slime.backends.megatron.freeze import select_trainable
from slime.backends.megatron.inputs import MicroBatch, PackBuilder
from slime.backends.megatron.model import Scores, Scoring, build_chunk
from slime.backends.megatron.optimizer import ScheduledOptimizer
from slime.backends.megatron.rehearsal import no_loss, without_a_trace
from slime.backends.megatron.routing import ENGINE, RoutingReplay
from slime.backends.megatron.schedule import run_schedule
from slime.backends.megatron.shape import merged_settings
from slime.backends.megatron.weights import ModelWeights
from slime.backends.needs import entropy_needs_gradient, needs_entropy, needs_logits
from slime.backends.offload import Offloader
from slime.backends.saving import BackgroundSave, new_save_group
from slime.backends.steps import StepAccounting
from slime.backends.tensor_shards import ShardMemory
from slime.backends.token_batch import TokenBatch
from slime.backends.token_budget import rehearsal_batch
from slime.checkpoint.files import FileEntry
from slime.config.hf_config import megatron_folder
from slime.config.hooks import load_function
from slime.config.layout import ParallelLayout
from slime.config.seeds import derive_seed
from slime.data.fields import RankBatch
from slime.data.schedule import PackingSettings
from slime.models.loading import check_checkpoint, load_hf_config
from slime.weights.hf_folder import (
    HfFolder,
    copy_companions,
    copy_config,
    resolve_folder,
    without_mtp_layers,
    write_tensors,
)
from slime.weights.maps.family import moe_layers
from slime.weights.maps.registry import family_of

logger = logging.getLogger(__name__)


class MegatronBackend(StepAccounting):
    """Actor or critic. Every method is called on all ranks together.

    ``scoring`` of log-probs and losses happens on the last pipeline stage; results are sent to the others, so that
    every rank returns the same.
    """

    def __init__(self, args: Any, role: str, rank: int, world_size: int, device: torch.device) -> None:
        self.args, self.role, self.device = args, role, device
        self.packing = PackingSettings.from_args(args)
        self.loss_settings = LossSettings.from_args(args)
        self.rank, self.world_size = rank, world_size
        self.layout = ParallelLayout.from_args(args)
        if problems := self.layout.problems():
            raise MegatronError("; ".join(problems))
        groups.initialize(self.layout, args.seed, args.distributed_timeout_minutes)
        self.data_parallel_rank, self.data_parallel_size = self.layout.data_rank(rank), self.layout.dp
        data, context = groups.data_group(), groups.context_group()
        with_context = mpu.get_data_parallel_group(with_context_parallel=True)
        self.reduce = DataParallelReduce(data.size(), device, data, context)
        self.share_reduce = DataParallelReduce(with_context.size(), device, with_context)
        if args.custom_megatron_init_path:
            load_function(args.custom_megatron_init_path)(args)
        modules.fuse(bool(args.compile_layers))
        self._build_model()
        self.builder = PackBuilder(
            device=device,
            context_group=context,
            pad_to_multiple=self._pad_multiple(),
            # Siblings' prompts may have gone to other experts each.
            share_prompts=args.share_prompt_in_pack and not args.use_rollout_routing_replay,
            chunk_size=args.log_probs_chunk_size,
            fused=device.type == "cuda" and bool(args.compile_layers),
        )
        self.optimizer = ScheduledOptimizer(args, role, self.chunks)
        self.offloader = Offloader()
        self.bank = WeightBank(
            self.weights.tensors(),
            may_swap_pointers=False,
            on_device=role == "actor" and keeps_copies_on_device(args, self.weights.tensors()),
            arena=self.offloader.host if device.type == "cuda" else None,  # the model is awake then
        )
        self.moving_copies: set[str] = set()
        self.saving: BackgroundSave | None = None
        self.save_group = new_save_group(args)
        self.save_memory = ShardMemory()
        if role == "actor":
            self.moving_copies = load_copies(args, self.bank, _initial_weights(args), self._load_copy)

    def _build_model(self) -> None:
        args = self.args
        self.hf_config = load_hf_config(args.hf_checkpoint, args.trust_remote_code).get_text_config()
        self.family = family_of(self.hf_config, args.model_name)
        self.settings = merged_settings(args, self.family, self.hf_config)
        self.config = transformer_config(args, self.settings, self.layout, self.device)
        stages = range(self.layout.vpp) if self.layout.vpp > 1 else (None,)
        seed = derive_seed(args.seed, "value head")
        rotary = None if self.config.multi_latent_attention else modules.scaled_frequencies(self.hf_config)
        models = [build_chunk(self.config, self.settings, self.role, stage, seed, rotary) for stage in stages]
        self.weights = ModelWeights(models, self.family, self.settings, self.role)
        self.chunks: list[Any] = models
        self._read_weights(_initial_weights(args))
        select_trainable(self.weights, args)
        self.routing: RoutingReplay | None = None
        if args.use_routing_replay and self.role == "actor" and self.settings.get("num_experts"):
            with_experts = moe_layers(self.settings)
            self.routing = RoutingReplay(
                models, with_experts, self.config.sequence_parallel, bool(args.use_rollout_routing_replay)
            )
        ddp = ddp_config(args)
        self.chunks = [
            DistributedDataParallel(self.config, ddp, model, disable_bucketing=i > 0) for i, model in enumerate(models)
        ]
        self.lazy_gather = bool(ddp.overlap_param_gather)
        self.config.grad_scale_func = None
        self.config.finalize_model_grads_func = _sum_gradients
        if ddp.overlap_grad_reduce:
            waits = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = waits if len(waits) > 1 else waits[0]

    def _pad_multiple(self) -> int:
        multiple = self.layout.tp if self.config.sequence_parallel else 1
        if self.device.type == "cuda":  # fewer shapes for kernels
            multiple *= -(-self.args.data_pad_size_multiplier // (multiple * self.layout.cp))
        return max(multiple, 1)

    def _load_copy(self, tag: str, path: str) -> None:
        """Another model of the same shape, read through the live parameters."""
        with self.bank.filling(tag):
            self._read_weights(path)

    def _read_weights(self, path: str) -> None:
        """Of a Hugging Face folder, or Megatron weights of any layout, into the live parameters."""
        folder = megatron_folder(path)
        if folder is None:
            if self.rank == 0:  # the driver has looked already, where it had the files
                check_checkpoint(path, self.args.trust_remote_code)
            self.weights.load(HfFolder(path))
        else:
            load_weights(self.chunks, self.layout, folder)

    # --- forward only ---------------------------------------------------------------------------

    def log_probs(
        self, batch: RankBatch, model: ModelTag = "actor", with_entropy: bool = False, temperature: float | None = None
    ) -> dict[str, list[Tensor]]:
        """Log-probs (and entropy) of every sample's response under one of the weight copies."""
        assert self.role == "actor", "a critic has no log-probs"
        temperature = self.args.rollout_temperature if temperature is None else temperature
        names = ["log_probs", "entropy"] if with_entropy else ["log_probs"]
        if self.args.custom_megatron_before_log_prob_hook_path:
            hook = load_function(self.args.custom_megatron_before_log_prob_hook_path)
            hook(self.args, self.chunks, {"ref": "ref_", "teacher": "teacher_"}.get(model, ""))
        policy = model in ("actor", "old_actor")  # others choose their experts themselves
        mode = ("replay" if self.args.use_rollout_routing_replay else "record") if policy else None
        with self._weights_of(model), self._routed(batch, mode):
            values = self._score(batch, Scoring(temperature=temperature, with_entropy=with_entropy), names)
        return dict(zip(names, values, strict=True))

    def values(self, batch: RankBatch) -> list[Tensor]:
        """The critic's values of every sample's response."""
        assert self.role == "critic", "only a critic has values"
        with self._weights_of("actor"):
            return self._score(batch, Scoring(), ["values"])[0]

    @torch.no_grad()
    def _score(self, batch: RankBatch, scoring: Scoring, names: list[str]) -> list[list[Tensor]]:
        """Fields of :class:`Scores` per sample, float32 on the CPU, on every rank."""
        lengths = [int(x) for x in batch["response_lengths"]]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        out = torch.zeros(len(names), int(starts[-1]), dtype=torch.float32, device=self.device)

        def keep(micro: MicroBatch, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
            if micro.indices:
                index = micro.response_index or [torch.arange(n) for n in micro.response_lengths]
                rows = torch.cat([x + starts[i] for i, x in zip(micro.indices, index, strict=True)]).to(self.device)
                for row, name in zip(out, names, strict=True):
                    row.index_copy_(0, rows, getattr(scores, name).float())
            return out.new_zeros(()), {}

        packs = self.forward_packs(batch, self.layout.pp)
        self._run(batch, packs, scoring, keep, forward_only=True)
        if (context := groups.context_group()) is not None:
            dist.all_reduce(out, group=context)
        groups.broadcast_from_last_stage([out])
        return [list(row.split(lengths)) for row in out.cpu()]

    # --- training -------------------------------------------------------------------------------

    def train_step(self, batch: RankBatch, step: int) -> Metrics:
        """One optimizer step. The loss is a sum of shares over micro-batches and ranks, and so is the gradient.

        Raises:
            NonFiniteError: before the weights change.
        """
        args = self.args
        if args.custom_megatron_before_train_step_hook_path:
            hook = load_function(args.custom_megatron_before_train_step_hook_path)
            hook(args, batch.get("rollout_id"), step, self.chunks, self.optimizer.chained, self.optimizer.scheduler)
        scheduled, trained = self.scheduled_and_trained(batch, step)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.chained.zero_grad()
        scoring = self._scoring_of_training()

        def share(micro: MicroBatch, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
            return self._loss(batch, step, micro, scores)

        shares: dict[str, float] = {}
        with self._routed(batch, "replay"):
            for metrics in self._run(batch, trained, scoring, share, forward_only=False):
                self.add_shares(shares, metrics)
        shares = groups.object_of_last_stage(shares)
        self.require_finite(shares.get("loss", 0.0), "loss", batch, step, self.optimizer.steps)
        grad_norm = self.optimizer.grad_norm()
        self.require_finite(grad_norm, "gradient norm", batch, step, self.optimizer.steps)
        result = self.step_metrics(shares, batch, scheduled, trained)
        result["grad_norm"] = grad_norm
        result["lr-pg_0"] = self.optimizer.step(grad_norm)
        result["global_batch_size"] = float(batch["global_batch_sizes"][step])
        return result

    def _scoring_of_training(self) -> Scoring:
        args = self.args
        if self.role != "actor":
            return Scoring()
        return Scoring(
            temperature=args.rollout_temperature,
            with_entropy=needs_entropy(args),
            entropy_grad=entropy_needs_gradient(args),
            with_logits=needs_logits(args),
        )

    def rehearse(self, tokens: int) -> None:
        """See :meth:`TrainBackend.rehearse`."""
        self.optimizer.prime()  # moments would be made in the first step
        batch = rehearsal_batch(tokens * self.layout.cp, self.hf_config.vocab_size)
        everything = list(range(len(batch["tokens"])))
        with without_a_trace(self.config, self.chunks):  # so many that the first stage holds as many as it ever does
            self._run(batch, [everything] * (2 * self.layout.pp), self._scoring_of_training(), no_loss, False)
        self.optimizer.chained.zero_grad()

    def _loss(self, batch: RankBatch, step: int, micro: MicroBatch, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        current = scores.values if scores.values is not None else scores.log_probs
        assert current is not None
        if not micro.indices:
            return current.sum() * 0.0, {}
        outputs: dict[str, Any] = {"values": scores.values} if scores.values is not None else {
            "log_probs": scores.log_probs, "entropy": scores.entropy
        }  # fmt: skip
        if scores.logits is not None:
            outputs |= {"logits": scores.logits, "targets": micro.scoring.targets}
        tokens = TokenBatch.from_rank_batch(
            batch, micro.indices, device=self.device, response_index=micro.response_index, **outputs
        )
        return compute_loss(
            self.loss_settings,
            tokens,
            num_rollouts=batch["global_batch_sizes"][step],
            num_tokens=batch["global_token_counts"][step],
            reduce=self.reduce,
        )

    def _run(self, batch: RankBatch, micro_batches: Any, scoring: Scoring, on_scores: Any, forward_only: bool) -> Any:
        """Megatron's schedule over this rank's micro-batches; what ``on_scores`` returned beside the loss."""
        aligned = self.aligned(micro_batches, self.layout.vpp_group)
        micros = [self.builder.build(batch, indices, scoring) for indices in aligned]
        return run_schedule(self.chunks, micros, on_scores, forward_only, self._around) if micros else []

    _around: Any = None
    """What each forward runs in; None without routing replay."""

    @contextmanager
    def _routed(self, batch: RankBatch, mode: Any) -> Iterator[None]:
        """Record or replay the choice of experts in the passes inside, where the flags ask for it."""
        if self.routing is None or mode is None or (ENGINE not in batch and "rewards" not in batch):
            yield  # no replay, or a probe, which is no sample of a rollout
            return
        with self.routing.during(batch, mode) as self._around:
            yield
        self._around = None

    # --- weights and state ----------------------------------------------------------------------

    @contextmanager
    def _weights_of(self, tag: str) -> Iterator[None]:
        self._finish_gather()
        with self.bank.using(tag):
            yield

    def _finish_gather(self) -> None:
        """With ``--overlap-param-gather`` the last update reaches this rank's weights when they are used next."""
        if self.lazy_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors with the checkpoint's names; may alias the live weights."""
        assert self.role == "actor", "a critic's weights go to no engine"
        self._finish_gather()
        yield from self.weights.gather()

    def save_hf(self, path: Path) -> None:
        """Write a Hugging Face folder of the current weights (``--save-hf``)."""
        path, writer = Path(path), self.rank == 0
        write_tensors(self.named_weights(), path, writer)
        if writer:
            source = resolve_folder(self.args.hf_checkpoint)
            copy_companions(source, path)
            changes, notice = without_mtp_layers(source)
            copy_config(source, path, **changes)
            if notice:
                logger.warning("%s: %s", path, notice)
        self.barrier()

    def copy_weights(self, source: ModelTag, target: ModelTag) -> None:
        """Make one copy equal to another; a target that does not exist yet is made."""
        self._finish_gather()
        self.bank.copy(source, target)
        if target != "actor":
            self.moving_copies.add(target)

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments (``--reset-optimizer-states``)."""
        self.optimizer.reset()

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def take_save_memory(self) -> None:
        if not self.save_memory.is_taken and self.args.ckpt_format != "torch":  # whose files are whole storages
            take_save_memory(self, with_optimizer=not self.args.no_save_optim)

    def save(self, path: Path) -> list[FileEntry]:
        self._finish_gather()
        return save_training_state(self, Path(path), with_optimizer=not self.args.no_save_optim)

    def load(self, path: Path) -> None:
        self._finish_gather()
        load_training_state(self, Path(path))

    def clear_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def sleep(self, keep_weights: bool = False) -> None:
        """Weights, moments and main parameters to pinned CPU memory; gradients are dropped."""
        self._finish_gather()
        for buffer in self._gradient_buffers():
            buffer.untyped_storage().resize_(0)
        weights = [x.detach() for _, x in self.weights.tensors()]
        self.offloader.sleep([*weights, *self.optimizer.tensors()], weights if keep_weights else ())
        self.clear_memory()

    def wake(self) -> None:
        self.offloader.wake()
        for buffer in self._gradient_buffers():
            buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
            buffer.zero_()

    def _gradient_buffers(self) -> list[Tensor]:
        if self.device.type != "cuda":
            return []
        return [b.grad_data for chunk in self.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _sum_gradients(chunks: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Sum gradients over ranks; shares of losses are divided by the step's count already."""
    finalize_model_grads(chunks, None, **kwargs)


def _initial_weights(args: Any) -> str:
    """``--load`` where it names weights to start from (a snapshot is read later), else ``--ref-load`` where that is a
    Megatron checkpoint, else ``--hf-checkpoint``."""
    if args.load and ((Path(args.load) / "config.json").is_file() or (Path(args.load) / "trainer.json").is_file()):
        return str(args.load)
    return str(args.ref_load if megatron_folder(args.ref_load) else args.hf_checkpoint)
