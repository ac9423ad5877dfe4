"""The interface of a training backend, and the computations that the flags of a run need of it before
and during a training step. The batch that it trains on is described in :mod:`slime.data.fields`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from slime.algorithms.algorithm import custom_setting
from slime.config.algorithm import algorithm_class, registered_loss
from slime.config.args import Args
from slime.data.fields import RankBatch

if TYPE_CHECKING:
    import torch

    from slime.backends.collectives import DataParallelReduce
    from slime.backends.saving import BackgroundSave
    from slime.checkpoint.files import FileEntry
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


SAFE_TIS_HOOKS = ("vanilla_tis_function", "icepop_function", "compute_mis_weights")


@dataclass(frozen=True)
class TrainNeeds:
    """Which forward passes and which outputs of the model a run needs, read from the flags once.

    Every pass that is not needed is skipped, and only this class decides that. All ranks must
    agree, because a forward pass is a collective operation. So the decisions depend only on flags,
    and on entries of the batch that are the same on every rank.
    """

    ref_log_probs: bool
    """Whether log-probs of a reference model are used in the reward (``--kl-coef``) or loss
    (``--use-kl-loss``).
    """
    teacher_log_probs: bool
    """Whether the trainer has the teacher of on-policy distillation (``--opd-type megatron``)."""
    old_actor: bool
    """Whether the old log-probs are those of a separate copy of the weights
    (``--keep-old-actor``).
    """
    old_log_probs: bool
    """Whether the old log-probs are recomputed even if the rollout has a single optimizer step."""
    squared_probs: bool
    """Whether a pass at half the temperature computes Σπ² over the vocabulary."""
    trains: bool
    """Whether the loss uses old log-probs. Supervised fine-tuning does not."""
    engine_log_probs: bool
    """Whether the engine's log-probs are used as the old ones (``--use-rollout-logprobs``)."""
    rollout_entropy: bool
    """Whether the pass that recomputes log-probs also computes the entropy
    (``--use-rollout-entropy``).
    """
    entropy: bool
    """Whether the forward pass of training computes the entropy of the policy, for the loss or as a
    metric.
    """
    entropy_grad: bool
    """Whether this entropy has a gradient."""
    logits: bool
    """Whether the loss uses the logits (``TokenBatch.logits``)."""
    temperature: float
    """The logits of training are divided by it: ``--rollout-temperature``, with which the engines
    sampled; 1 for supervised fine-tuning, whose tokens nobody sampled."""
    skips_zero_advantages: bool
    """Whether the actor may skip the forward and backward of samples whose final advantages are all
    exactly 0, because their gradient is exactly 0. ``num_rollouts`` and ``num_tokens`` of the step
    do not change. It is False if another term has a gradient without an advantage (KL loss,
    entropy), or if a hook may add such a term."""

    @classmethod
    def from_args(cls, args: Args) -> TrainNeeds:
        # Each field is one rule. The old log-probs have the most reasons: whatever compares the
        # policy with itself before the rollout's first step needs them.
        policy = args.loss_type == "policy_loss"
        algorithm = algorithm_class(args.advantage_estimator)
        loss = registered_loss(args)
        return cls(
            ref_log_probs=(args.loss_type != "sft_loss" and (args.kl_coef != 0 or args.use_kl_loss))
            or (loss is not None and loss.needs_reference),
            teacher_log_probs=args.use_opd and args.opd_type == "megatron",
            old_actor=bool(args.keep_old_actor),
            old_log_probs=not policy
            or args.kl_coef != 0
            or algorithm.needs_old_log_probs
            or args.keep_old_actor
            or args.use_opd
            or args.get_mismatch_metrics
            or bool(custom_setting(args, "tis_batch_normalize", False))
            or (args.use_routing_replay and not args.use_rollout_routing_replay),
            squared_probs=policy and algorithm.needs_squared_probs,
            trains=args.loss_type != "sft_loss" and (policy or args.compute_advantages_and_returns),
            engine_log_probs=args.use_rollout_logprobs and not args.get_mismatch_metrics,
            rollout_entropy=args.use_rollout_entropy,
            entropy=policy,
            entropy_grad=policy and args.entropy_coef != 0,
            logits=args.loss_type == "custom_loss" or (loss is not None and loss.needs_logits),
            temperature=1.0 if args.loss_type == "sft_loss" else args.rollout_temperature,
            skips_zero_advantages=args.skip_zero_advantage_groups
            and policy
            and args.entropy_coef == 0
            and not (args.use_kl_loss and args.kl_loss_coef != 0)
            and args.observation_loss_coef == 0
            and not args.custom_pg_loss_reducer_function_path
            and algorithm.zero_advantage_has_no_gradient
            and _is_linear(args.custom_tis_function_path),
        )

    def recomputes_old_log_probs(self, batch: RankBatch) -> bool:
        """Return whether the trainer must compute log π_old in a forward pass before the first step
        of this rollout.

        Otherwise the loss uses the engine's log-probs, or the current ones without gradient. The
        ratio is then 1 with the right gradient, as it is in a first step in any case.
        """
        if not self.trains:
            return False
        if self.engine_log_probs:
            return batch.get("rollout_log_probs") is None
        return self.old_log_probs or len(batch["global_batch_sizes"]) > 1

    def log_prob_passes(self, steps: int) -> int:
        """Return how many forward passes over all samples come before the ``steps`` optimizer steps
        of a rollout.
        """
        old = self.trains and not self.engine_log_probs and (self.old_log_probs or steps > 1)
        squares = self.squared_probs * (1 + self.engine_log_probs)
        others = self.ref_log_probs + self.teacher_log_probs + squares
        return others + (old or self.rollout_entropy)


def _is_linear(path: str | None) -> bool:
    """Return whether the function of ``--custom-tis-function-path`` is known to only multiply the
    loss by weights.
    """
    return not path or (
        path.startswith("slime.") and path.replace(":", ".").rpartition(".")[2] in SAFE_TIS_HOOKS
    )
