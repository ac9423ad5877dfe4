"""One rank of data-parallel training with FSDP2: ``slime.backends.base.TrainBackend``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from slime.backends.base import Metrics, ModelTag, RankBatch
from slime.backends.fsdp import micro_batches as mb
from slime.backends.fsdp.bank import WeightBank
from slime.backends.fsdp.checkpoint import load_training_state, save_training_state
from slime.backends.fsdp.collectives import DataParallelReduce
from slime.backends.fsdp.hf_weights import iter_hf_weights, save_hf_checkpoint
from slime.backends.fsdp.model import DTYPES, build_scorer, checkpoint_names, load_full_model
from slime.backends.fsdp.offload import Offloader
from slime.backends.fsdp.optimizer import ScheduledAdamW
from slime.backends.fsdp.schedule import LrSchedule
from slime.backends.loss import (
    TokenBatch,
    compute_loss,
    entropy_needs_gradient,
    is_max_metric,
    needs_entropy,
    needs_logits,
    needs_ref_log_probs,
    needs_teacher_log_probs,
    rescale_diagnostics,
    zero_advantage_groups_skippable,
)
from slime.models.inputs import ModelInputs
from slime.models.scorer import PolicyScorer, ValueScorer


class NonFiniteError(FloatingPointError):
    """The loss or the gradient norm is nan or infinite; the weights were not changed."""


class FsdpBackend:
    """Actor or critic. Every method is called on all ranks together."""

    def __init__(self, args: Any, role: str, rank: int, world_size: int, device: torch.device) -> None:
        self.args, self.role, self.device = args, role, device
        self.rank = self.data_parallel_rank = rank
        self.world_size = self.data_parallel_size = world_size
        self.reduce = DataParallelReduce(world_size, device)
        self.scorer, self.builder = build_scorer(args, role, device, world_size)
        self.named_parameters: list[tuple[str, nn.Parameter]] = checkpoint_names(self.scorer)
        self.named_buffers: list[tuple[str, Tensor]] = _persistent_buffers(self.scorer)
        self.optimizer = ScheduledAdamW(self.named_parameters, args, LrSchedule.from_args(args, role))
        self.bank = WeightBank(self.named_parameters)
        self.moving_copies: set[str] = set()
        """Copies that change during a run, and so belong in its snapshots."""
        self.offloader = Offloader()
        if role == "actor":
            self._load_copies()

    def _load_copies(self) -> None:
        args = self.args
        if needs_ref_log_probs(args):
            if args.ref_load and args.ref_load != args.hf_checkpoint:
                self._load_copy("ref", args.ref_load)
            else:
                self.bank.copy("actor", "ref")
            if args.ref_update_interval:
                self.moving_copies.add("ref")
        if needs_teacher_log_probs(args):
            self._load_copy("teacher", args.opd_teacher_load)
        if args.keep_old_actor:
            self.bank.copy("actor", "old_actor")
            self.moving_copies.add("old_actor")

    def _load_copy(self, tag: str, path: str) -> None:
        self.bank.add(tag, dict(load_full_model(self.args, path).named_parameters()))

    # --- forward only ---------------------------------------------------------------------------

    @torch.no_grad()
    def log_probs(
        self, batch: RankBatch, model: ModelTag = "actor", with_entropy: bool = False, temperature: float | None = None
    ) -> dict[str, list[Tensor]]:
        """Log-probs (and entropy) of every sample's response under one of the weight copies."""
        temperature = self.args.rollout_temperature if temperature is None else temperature
        scorer = self.scorer
        assert isinstance(scorer, PolicyScorer), "a critic has no log-probs"
        out: dict[str, list[Tensor | None]] = {"log_probs": [None] * len(batch["tokens"])}
        if with_entropy:
            out["entropy"] = [None] * len(batch["tokens"])
        parts = []
        with self.bank.using(model):
            for indices in self._aligned(batch["micro_batch_indices"]):
                inputs = self._inputs(batch, indices)
                scores, _ = scorer(inputs, temperature, with_entropy)
                parts.append((indices, inputs.response_lengths, scores))
            self._reshard()
        for indices, lengths, scores in parts:  # to the CPU at the end, so that no micro-batch waits for the last
            if indices:
                mb.scatter_to_samples(scores.log_probs, lengths, indices, out["log_probs"])
                if scores.entropy is not None:
                    mb.scatter_to_samples(scores.entropy, lengths, indices, out["entropy"])
        return {key: _complete(key, values) for key, values in out.items()}

    @torch.no_grad()
    def values(self, batch: RankBatch) -> list[Tensor]:
        """The critic's values of every sample's response."""
        assert isinstance(self.scorer, ValueScorer), "only a critic has values"
        out: list[Tensor | None] = [None] * len(batch["tokens"])
        for indices in self._aligned(batch["micro_batch_indices"]):
            inputs = self._inputs(batch, indices)
            values = self.scorer(inputs)
            if indices:
                mb.scatter_to_samples(values, inputs.response_lengths, indices, out)
        self._reshard()
        return _complete("values", out)

    # --- training -------------------------------------------------------------------------------

    def train_step(self, batch: RankBatch, step: int) -> Metrics:
        """One optimizer step. The loss is a sum of shares over micro-batches and ranks, and so is the gradient.

        Raises:
            NonFiniteError: before the weights change.
        """
        scheduled = mb.of_step(batch, step)
        skipping = self.role == "actor" and batch.get("advantages") is not None
        skipping = skipping and zero_advantage_groups_skippable(self.args)
        trained = mb.without_zero_advantages(batch, scheduled) if skipping else scheduled
        self.optimizer.zero_grad()
        shares: dict[str, float] = {}
        for part in [self._backward(batch, indices, step) for indices in self._aligned(trained)]:
            self._add_shares(shares, part)  # waits for the accelerator: once all its work is queued
        self._require_finite(shares.get("loss", 0.0), "loss", batch, step)
        grad_norm = math.sqrt(self.reduce.total([float(self.optimizer.local_square_norm())])[0])
        self._require_finite(grad_norm, "gradient norm", batch, step)
        metrics = self._step_metrics(shares, batch, scheduled, trained)
        metrics["grad_norm"] = grad_norm
        metrics["lr-pg_0"] = self.optimizer.step(grad_norm, self.args.clip_grad)
        metrics["global_batch_size"] = float(batch["global_batch_sizes"][step])
        return metrics

    def _backward(self, batch: RankBatch, indices: list[int], step: int) -> dict[str, Tensor]:
        """One micro-batch; without samples a dummy that keeps this rank in step with the others."""
        args = self.args
        inputs = self._inputs(batch, indices)
        if isinstance(self.scorer, ValueScorer):
            values = self.scorer(inputs)
            current: dict[str, Any] = {"values": values}
        else:
            scores, logits = self.scorer(
                inputs, args.rollout_temperature, needs_entropy(args), entropy_needs_gradient(args), needs_logits(args)
            )
            values = scores.log_probs
            current = {"log_probs": values, "entropy": scores.entropy}
            if logits is not None:
                current |= {"logits": logits, "targets": inputs.targets}
        if not indices:
            (values.sum() * 0.0).backward()
            return {}
        tokens = TokenBatch.from_rank_batch(batch, indices, device=self.device, **current)
        loss, metrics = compute_loss(
            args,
            tokens,
            num_rollouts=batch["global_batch_sizes"][step],
            num_tokens=batch["global_token_counts"][step],
            reduce=self.reduce,
        )
        loss.backward()
        return metrics

    def _step_metrics(
        self, shares: dict[str, float], batch: RankBatch, scheduled: mb.MicroBatches, trained: mb.MicroBatches
    ) -> Metrics:
        metrics = self.reduce.metrics(shares, same_names=not self._uneven)
        counts = [float(sum(map(len, part))) for part in (scheduled, trained)]
        weights = [mb.weight(self.args, batch, part) for part in (scheduled, trained)]
        all_count, count, all_weight, weight = self.reduce.total([*counts, *weights])
        if count < all_count:
            metrics = {"loss": 0.0, "pg_loss": 0.0, "pg_clipfrac": 0.0} | metrics
            metrics = rescale_diagnostics(metrics, weight / all_weight if all_weight else 0.0)
        if self.role == "actor":
            metrics["skipped_sample_ratio"] = 1.0 - count / all_count if all_count else 0.0
        return metrics

    def _add_shares(self, total: dict[str, float], shares: dict[str, Tensor]) -> None:
        if not shares:
            return
        values = torch.stack([x.detach().double().reshape(()) for x in shares.values()]).tolist()
        for name, value in zip(shares, values, strict=True):
            before = total.get(name)
            if before is None:
                total[name] = value
            else:
                total[name] = max(before, value) if is_max_metric(name) else before + value

    def _require_finite(self, value: float, what: str, batch: RankBatch, step: int) -> None:
        """The same verdict on every rank, so that none waits for one that raised."""
        everyones = self.reduce.each(value)
        bad = [rank for rank, x in enumerate(everyones) if not math.isfinite(x)]
        if bad:
            raise NonFiniteError(
                f"{self.role}: {what} is {everyones[bad[0]]} on rank {', '.join(map(str, bad))} in optimizer step "
                f"{self.optimizer.steps} (step {step} of rollout {batch.get('rollout_id')}); weights are unchanged. "
                "Lower --lr or --clip-grad, or look at the samples of that rollout (--save-debug-rollout-data)"
            )

    # --- ranks in step --------------------------------------------------------------------------

    _uneven = False
    """Whether some rank had fewer micro-batches than another in the last pass."""

    def _aligned(self, micro_batches: mb.MicroBatches) -> mb.MicroBatches:
        """As many micro-batches as the rank with the most has: forward and backward are collectives."""
        count = len(micro_batches)
        most, least = self.reduce.maximum([float(count), float(-count)])
        self._uneven = most != -least
        return [*micro_batches, *([[]] * (int(most) - count))]

    def _inputs(self, batch: RankBatch, indices: list[int]) -> ModelInputs:
        if indices:
            return self.builder.from_batch(batch, indices)
        return self.builder.build([torch.zeros(2, dtype=torch.long)], [1], [0], [None])

    def _reshard(self) -> None:
        """FSDP's root keeps its gathered weights after a forward; without a backward they would go stale."""
        if isinstance(self.scorer, FSDPModule):
            self.scorer.reshard()

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    # --- weights and state ----------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors with the checkpoint's names, in the dtype that computes; may alias the live weights."""
        assert isinstance(self.scorer, PolicyScorer), "a critic's weights go to no engine"
        yield from iter_hf_weights(self.scorer.hf, DTYPES[self.args.train_dtype])

    def save_hf(self, path: Path) -> None:
        """Write a Hugging Face folder of the current weights (``--save-hf``)."""
        assert isinstance(self.scorer, PolicyScorer), "a critic is no language model"
        dtype = DTYPES[self.args.train_dtype]
        save_hf_checkpoint(self.scorer.hf, Path(path), dtype, self.args.hf_checkpoint, writer=self.rank == 0)
        self.barrier()

    def copy_weights(self, source: ModelTag, target: ModelTag) -> None:
        """Make one copy equal to another; a target that does not exist yet is made."""
        self.bank.copy(source, target)
        if target != "actor":
            self.moving_copies.add(target)

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments (``--reset-optimizer-states``)."""
        self.optimizer.reset()

    def save(self, path: Path) -> None:
        save_training_state(self, Path(path), with_optimizer=not self.args.no_save_optim)

    def load(self, path: Path) -> None:
        load_training_state(self, Path(path))

    def clear_memory(self) -> None:
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def sleep(self) -> None:
        self.clear_memory()
        tensors = [p.detach() for _, p in self.named_parameters] + [b for _, b in self.named_buffers]
        self.offloader.sleep([*tensors, *self.optimizer.tensors().values()])

    def wake(self) -> None:
        self.offloader.wake()


def _persistent_buffers(scorer: nn.Module) -> list[tuple[str, Tensor]]:
    names = set(scorer.state_dict())
    return [(name.removeprefix("hf."), b) for name, b in scorer.named_buffers() if name in names]


def _complete(key: str, values: list[Tensor | None]) -> list[Tensor]:
    missing = [i for i, value in enumerate(values) if value is None]
    if missing:
        raise ValueError(f"{key}: samples {missing[:8]} of the rank batch are in no micro-batch")
    return [value for value in values if value is not None]
