"""Checks of estimator, losses, KL, corrections and schedule."""

from __future__ import annotations

from slime.algorithms.dr_grpo import pg_loss_reducer
from slime.config.args import FLAGS, Args
from slime.config.estimator import algorithm_class, create_algorithm, known_where, loading_problem, trial_problem
from slime.config.rollout import old_actor_lag

_DR_GRPO_REDUCER = f"{pg_loss_reducer.__module__}.{pg_loss_reducer.__name__}"


def check_kl(args: Args) -> list[str]:
    problems = []
    if args.kl_coef != 0 and args.kl_loss_coef != 0:
        problems.append(
            f"--kl-coef {args.kl_coef} (KL in the reward) and --kl-loss-coef {args.kl_loss_coef} (KL in the loss) "
            "exclude each other: drop one"
        )
    if args.kl_loss_coef != 0 and not args.use_kl_loss:
        problems.append(f"--kl-loss-coef {args.kl_loss_coef} needs --use-kl-loss")
    if args.use_kl_loss and args.kl_loss_coef == 0:
        args.notices.append(
            "--use-kl-loss with --kl-loss-coef 0 trains nothing on the KL; the metric train/kl_loss costs a copy of "
            "the reference weights and a forward pass over every rollout: drop --use-kl-loss if you do not need it"
        )
    if args.kl_loss_type == "k1" and args.kl_loss_coef != 0 and not args.use_unbiased_kl:
        args.notices.append(
            "--kl-loss-type k1 in the loss does not regularise: its expected gradient is 0 for samples of the policy "
            "itself; use low_var_kl or k2, or add --use-unbiased-kl"
        )
    if args.ref_update_interval is not None and not (args.use_kl_loss or args.kl_coef != 0):
        args.notices.append("--ref-update-interval has no effect: no KL uses a reference model")
    return problems


def check_estimator(args: Args) -> list[str]:
    """The estimator can be loaded, and the other flags fit what its class needs and forbids."""
    name = args.advantage_estimator
    if problem := loading_problem(name) or trial_problem(args):
        return [problem]
    algorithm = algorithm_class(name)
    unknown = [switch for switch in (*algorithm.requires, *algorithm.forbids) if switch not in FLAGS]
    if unknown:
        return [f"--advantage-estimator {name}: requires or forbids {', '.join(unknown)}, which is no flag"]
    args.notices += create_algorithm(args).notices()
    if args.kl_coef != 0 and not algorithm.uses_kl_in_reward:
        args.notices.append(
            f"--kl-coef has no effect with --advantage-estimator {name}: use --use-kl-loss --kl-loss-coef"
        )
    problems = [
        f"--advantage-estimator {name} needs {FLAGS[switch].option}: {reason}"
        for switch, reason in algorithm.requires.items()
        if not getattr(args, switch)
    ]
    problems += [
        f"--advantage-estimator {name} and {FLAGS[switch].option} exclude each other: {reason}"
        for switch, reason in algorithm.forbids.items()
        if getattr(args, switch)
    ]
    own = (
        args.custom_advantage_function_path
        or args.custom_reward_post_process_path
        or args.custom_generate_function_path
    )
    trains_on_groups = algorithm.needs_group and args.rewards_normalization and args.loss_type == "policy_loss"
    if trains_on_groups and args.n_samples_per_prompt == 1 and not own:
        problems.append(
            f"--advantage-estimator {name} compares the samples of a group, and --n-samples-per-prompt 1 makes "
            f"every advantage 0: use 2 or more, or {known_where('needs_group', False)}"
        )
    reducer = (args.custom_pg_loss_reducer_function_path or "").replace(":", ".")
    if args.calculate_per_token_loss and reducer == _DR_GRPO_REDUCER:
        problems.append(
            f"--custom-pg-loss-reducer-function-path {reducer} divides by a constant, --calculate-per-token-loss by "
            "the tokens: drop one"
        )
    if args.num_critic_only_steps and not algorithm.needs_critic:
        problems.append(f"--num-critic-only-steps needs a critic: --advantage-estimator {known_where('needs_critic')}")
    return problems


def check_losses(args: Args) -> list[str]:
    problems = []
    if (args.loss_type == "custom_loss") != (args.custom_loss_function_path is not None):
        problems.append("--loss-type custom_loss and --custom-loss-function-path go together: give both or none")
    if args.eps_clip < 0 or args.eps_clip_high < 0:
        problems.append(
            f"--eps-clip {args.eps_clip} and --eps-clip-high {args.eps_clip_high}: clip distances are not negative"
        )
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        problems.append(f"--eps-clip-c {args.eps_clip_c}: the dual-clip constant must be above 1")
    if args.overlong_buffer_len and not 0 < args.overlong_buffer_len < args.rollout_max_response_len:
        problems.append(
            f"--overlong-buffer-len {args.overlong_buffer_len}: needs to be between 0 and --rollout-max-response-len "
            f"{args.rollout_max_response_len}"
        )
    for name in ("gamma", "lambd"):
        if not 0 <= getattr(args, name) <= 1:
            problems.append(f"--{name} {getattr(args, name)}: needs to be between 0 and 1")
    if args.only_train_params_name_list and args.freeze_params_name_list:
        problems.append("--only-train-params-name-list and --freeze-params-name-list exclude each other: drop one")
    return problems


def check_off_policy(args: Args) -> list[str]:
    problems = []
    if args.use_rollout_logprobs and args.use_tis:
        problems.append(
            "--use-rollout-logprobs takes the engine's log-probs as the old policy, so --use-tis has nothing to "
            "correct: drop one"
        )
    if args.get_mismatch_metrics and not args.custom_tis_function_path:
        problems.append("--get-mismatch-metrics needs --custom-tis-function-path, the function that measures")
    if args.tis_clip_low < 0 or args.tis_clip <= args.tis_clip_low:
        problems.append(
            f"--tis-clip {args.tis_clip} must be above --tis-clip-low {args.tis_clip_low}, and that 0 or more"
        )
    return problems


def check_opsm(args: Args, asynchronous: bool) -> list[str]:
    """OPSM masks by the drift between the policy and the old policy, which some settings make exactly 0.

    ``--keep-old-actor`` computes the old log-probs with the weights that generated the samples. In the synchronous loop
    these are the weights that training starts from, so it adds no drift there.
    """
    behind = asynchronous and args.keep_old_actor and old_actor_lag(args) == 1
    if args.use_opsm and args.num_steps_per_rollout == 1 and not args.use_rollout_logprobs and not behind:
        args.notices.append(
            "--use-opsm masks nothing: a rollout has one optimizer step, and the policy equals the old policy in it; "
            "use --num-steps-per-rollout 2 or more, the engine's log-probs as the old policy (--use-rollout-logprobs), "
            "or --keep-old-actor with train_async.py"
        )
    return []


def check_distillation(args: Args) -> list[str]:
    problems = []
    if args.use_opd and args.opd_type is None:
        problems.append("--use-opd needs --opd-type: sglang (the teacher answers over HTTP) or megatron")
    if args.opd_type and not args.use_opd:
        problems.append(f"--opd-type {args.opd_type} needs --use-opd")
    if args.opd_teacher_load and not (args.use_opd and args.opd_type == "megatron"):
        problems.append("--opd-teacher-load is for --use-opd --opd-type megatron")
    if args.use_opd and args.opd_type == "megatron" and not args.opd_teacher_load:
        problems.append("--opd-type megatron needs --opd-teacher-load")
    return problems


def check_schedule(args: Args) -> list[str]:
    problems = []
    if args.lr_warmup_fraction is not None and not 0 <= args.lr_warmup_fraction <= 1:
        problems.append(f"--lr-warmup-fraction {args.lr_warmup_fraction}: needs to be between 0 and 1")
    if args.lr_warmup_fraction and args.lr_warmup_iters:
        problems.append("--lr-warmup-fraction and --lr-warmup-iters say the same thing twice: drop one")
    if args.min_lr > args.lr:
        problems.append(f"--min-lr {args.min_lr} is above --lr {args.lr}")
    if args.lr_decay_style == "WSD" and not args.lr_wsd_decay_iters:
        problems.append("--lr-decay-style WSD needs --lr-wsd-decay-iters, the steps of its last phase")
    for name in ("lr_decay_samples", "lr_warmup_samples"):
        if name in args.megatron:
            option = "--" + name.replace("_", "-")
            problems.append(f"{option}: the schedule counts optimizer steps; use {option.replace('samples', 'iters')}")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(args, name) < 1:
            problems.append(f"--{name.replace('_', '-')} {getattr(args, name)}: needs to be at least 0 and below 1")
    return problems


ALGORITHM_RULES = (check_kl, check_estimator, check_losses, check_off_policy, check_distillation, check_schedule)
