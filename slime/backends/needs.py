"""What a run's flags need computed before and during a training step."""

from __future__ import annotations

from dataclasses import dataclass

from slime.algorithms.algorithm import custom_setting
from slime.config.algorithm import algorithm_class
from slime.config.args import Args
from slime.data.fields import RankBatch

SAFE_TIS_HOOKS = ("vanilla_tis_function", "icepop_function", "compute_mis_weights")


@dataclass(frozen=True)
class TrainNeeds:
    """Which forward passes and which outputs of the model a run needs, read from the flags once.

    Every pass that can be left out is left out, and this class is the one place that says when. All ranks must agree,
    because a forward pass is a collective. So the answers depend only on flags, and on entries of the batch that are
    the same on every rank.
    """

    ref_log_probs: bool
    """A reference model's log-probs enter the reward (``--kl-coef``) or the loss (``--use-kl-loss``)."""
    teacher_log_probs: bool
    """The trainer itself holds the teacher of on-policy distillation (``--opd-type megatron``)."""
    old_actor: bool
    """The old log-probs are those of a separate copy of the weights (``--keep-old-actor``)."""
    old_log_probs: bool
    """The old log-probs are recomputed even if the rollout takes a single optimizer step."""
    trains: bool
    """The loss uses old log-probs at all; supervised fine-tuning does not."""
    engine_log_probs: bool
    """The engine's log-probs serve as the old ones (``--use-rollout-logprobs``)."""
    rollout_entropy: bool
    """The pass that recomputes log-probs also computes the entropy (``--use-rollout-entropy``)."""
    entropy: bool
    """The training forward pass computes the policy's entropy, for the loss or as a metric."""
    entropy_grad: bool
    """That entropy carries a gradient."""
    logits: bool
    """The loss reads the logits themselves (``TokenBatch.logits``), as only a custom loss does."""
    skips_zero_advantages: bool
    """A sample whose final advantages are all exactly 0 has a gradient of exactly 0, so the actor may leave it out of
    forward and backward, with ``num_rollouts`` and ``num_tokens`` of the step unchanged. False where another term has
    a gradient without an advantage (KL loss, entropy), or where a hook may add one."""

    @classmethod
    def from_args(cls, args: Args) -> TrainNeeds:
        policy, algorithm = args.loss_type == "policy_loss", algorithm_class(args.advantage_estimator)
        return cls(
            ref_log_probs=args.loss_type != "sft_loss" and (args.kl_coef != 0 or args.use_kl_loss),
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
            trains=args.loss_type != "sft_loss" and (policy or args.compute_advantages_and_returns),
            engine_log_probs=args.use_rollout_logprobs and not args.get_mismatch_metrics,
            rollout_entropy=args.use_rollout_entropy,
            entropy=policy,
            entropy_grad=policy and args.entropy_coef != 0,
            logits=args.loss_type == "custom_loss",
            skips_zero_advantages=args.skip_zero_advantage_groups
            and policy
            and args.entropy_coef == 0
            and not (args.use_kl_loss and args.kl_loss_coef != 0)
            and not args.custom_pg_loss_reducer_function_path
            and algorithm.zero_advantage_has_no_gradient
            and _is_linear(args.custom_tis_function_path),
        )

    def recomputes_old_log_probs(self, batch: RankBatch) -> bool:
        """Whether the trainer must compute log π_old in a forward pass before the first step of this rollout.

        Otherwise the loss takes the engine's, or the current log-probs without gradient: the ratio is then 1 with the
        right gradient, as it would be in a first step anyway.
        """
        if not self.trains:
            return False
        if self.engine_log_probs:
            return batch.get("rollout_log_probs") is None
        return self.old_log_probs or len(batch["global_batch_sizes"]) > 1


def _is_linear(path: str | None) -> bool:
    """Whether the function of ``--custom-tis-function-path`` is known to weigh the loss and to add nothing to it."""
    return not path or (path.startswith("slime.") and path.replace(":", ".").rpartition(".")[2] in SAFE_TIS_HOOKS)
