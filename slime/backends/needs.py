"""What a run's flags need computed before and during a training step.

Each forward pass that can be left out is; these functions are the one place that says when. They
must agree on all ranks, since a forward pass is a collective: they look at flags and at entries of
the batch that are the same everywhere.
"""

from __future__ import annotations

from slime.algorithms.algorithm import custom_setting
from slime.config.algorithm import algorithm_class
from slime.config.args import Args
from slime.data.fields import RankBatch

SAFE_TIS_HOOKS = ("vanilla_tis_function", "icepop_function", "compute_mis_weights")


def steps_per_rollout(args: Args, batch: RankBatch | None = None) -> int:
    """Optimizer steps on one rollout: those of the batch, if given, else what the flags say."""
    if batch is not None:
        return len(batch["global_batch_sizes"])
    if args.num_steps_per_rollout:
        return int(args.num_steps_per_rollout)
    if args.global_batch_size:
        return max(1, args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)
    return 1


def needs_old_log_probs(args: Args, batch: RankBatch | None = None) -> bool:
    """Whether the trainer must recompute log π_old in a forward pass before the first step.

    Otherwise the loss takes the engine's (``--use-rollout-logprobs``), or the current log-probs without
    gradient: the ratio is then 1 with the right gradient, as it would be in a first step anyway.

    Args:
        batch: gives the true number of steps, and whether the engine's log-probs are there at all.
    """
    if args.loss_type == "sft_loss":
        return False
    if not args.compute_advantages_and_returns and args.loss_type != "policy_loss":
        return False
    if args.use_rollout_logprobs and not args.get_mismatch_metrics:
        return batch is not None and batch.get("rollout_log_probs") is None
    return (
        steps_per_rollout(args, batch) > 1
        or args.loss_type != "policy_loss"
        or args.kl_coef != 0
        or algorithm_class(args.advantage_estimator).needs_old_log_probs
        or args.keep_old_actor
        or args.use_opd
        or args.get_mismatch_metrics
        or bool(custom_setting(args, "tis_batch_normalize", False))
        or (args.use_routing_replay and not args.use_rollout_routing_replay)
    )


def needs_ref_log_probs(args: Args) -> bool:
    """Whether a reference model's log-probs enter the reward (``--kl-coef``) or the loss (``--use-kl-loss``)."""
    return args.loss_type != "sft_loss" and (args.kl_coef != 0 or args.use_kl_loss)


def needs_teacher_log_probs(args: Args) -> bool:
    """Whether the trainer itself holds the teacher of on-policy distillation (``--opd-type megatron``)."""
    return args.use_opd and args.opd_type == "megatron"


def needs_entropy(args: Args) -> bool:
    """Whether the policy's entropy is computed in the training forward: for the loss or as a metric."""
    return args.loss_type == "policy_loss"


def entropy_needs_gradient(args: Args) -> bool:
    """Whether that entropy must carry a gradient; otherwise compute it without one."""
    return args.loss_type == "policy_loss" and args.entropy_coef != 0


def needs_logits(args: Args) -> bool:
    """Whether the loss wants the logits themselves (``TokenBatch.logits``): only a custom loss does."""
    return args.loss_type == "custom_loss"


def zero_advantage_groups_skippable(args: Args) -> bool:
    """Whether a sample whose final advantages are all exactly 0 has a gradient of exactly 0.

    Then the actor may leave it out of forward and backward, with the step's ``num_rollouts`` and
    ``num_tokens`` unchanged. False where another term has a gradient without an advantage (KL loss,
    entropy; the flags refuse losses of the router), or a hook may add one. Not for the critic.
    """
    return (
        args.skip_zero_advantage_groups
        and args.loss_type == "policy_loss"
        and args.entropy_coef == 0
        and not (args.use_kl_loss and args.kl_loss_coef != 0)
        and not args.custom_pg_loss_reducer_function_path
        and algorithm_class(args.advantage_estimator).zero_advantage_has_no_gradient
        and _tis_hook_is_linear(args)
    )


def _tis_hook_is_linear(args: Args) -> bool:
    path = args.custom_tis_function_path
    return not path or (path.startswith("slime.") and path.replace(":", ".").rpartition(".")[2] in SAFE_TIS_HOOKS)
