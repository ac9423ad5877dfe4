"""Flags of the KL divergence to the reference model, of off-policy correction, and of on-policy distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.flag import DERIVED, flag, hook_flag, path_flag
from slime.config.rollout import old_actor_lag, staleness_bound, trains_late

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass
class KlConfig:
    _title = "KL to the reference"

    use_kl_loss: bool = flag(False, help="Add the KL divergence from the reference model to the loss")
    kl_loss_coef: float = flag(0.0, help="Coefficient of the KL divergence in the loss; needs --use-kl-loss")
    kl_loss_type: str = flag(
        DERIVED,
        choices=("k1", "k2", "k3", "low_var_kl"),
        help="Estimator of the KL divergence. Default: low_var_kl in the loss, k1 in the reward (--kl-coef). "
        "In the loss k1 does not regularise",
    )
    kl_coef: float = flag(0.0, help="Coefficient of the KL divergence in the reward; excludes --kl-loss-coef")
    use_unbiased_kl: bool = flag(
        False, help="Multiply the KL divergence in the loss by the importance ratio, which makes the estimate unbiased"
    )
    ref_update_interval: int | None = flag(
        None, low=1, help="Number of rollouts between copies of the actor to the reference model. Default: never"
    )


@dataclass
class OffPolicyConfig:
    _title = "off-policy correction and routing replay"

    use_rollout_logprobs: bool = flag(False, help="Use the engine's log-probs as the old policy; excludes --use-tis")
    use_tis: bool = flag(
        DERIVED,
        help="Weigh the loss of each token by the truncated importance ratio (TIS) between trainer and engine. "
        "Default: on with --rollout-quantization, in train_async.py, and with --over-sampling-batch-size "
        "or --partial-rollout",
    )
    tis_clip: float = flag(2.0, help="Upper bound of the truncated importance ratio (--use-tis)")
    tis_clip_low: float = flag(0.0, low=0, help="Lower bound of the truncated importance ratio (--use-tis)")
    custom_tis_function_path: str | None = hook_flag(
        "Function that computes the importance weights of --use-tis, such as IcePop or MIS"
    )
    get_mismatch_metrics: bool = flag(
        False, help="Only log the mismatch of trainer and engine; needs --custom-tis-function-path"
    )
    use_opsm: bool = flag(False, help="Mask sequences with negative advantage from which the policy has drifted (OPSM)")
    opsm_delta: float = flag(
        1e-4, low=0, help="Mean log-prob difference per token above which --use-opsm masks a sequence"
    )
    use_routing_replay: bool = flag(
        False,
        help="Megatron: route tokens in training to the same experts as in the pass that computed the old log-probs",
    )
    use_rollout_routing_replay: bool = flag(
        False,
        help="Megatron with SGLang: route tokens in training to the same experts as in the engine; implies "
        "--use-routing-replay",
    )


@dataclass
class DistillationConfig:
    _title = "on-policy distillation"

    use_opd: bool = flag(False, help="On-policy distillation: train on the reverse KL divergence from a teacher")
    opd_type: str | None = flag(
        None,
        choices=("sglang", "megatron"),
        help="Location of the teacher for --use-opd. sglang: a server that is asked over HTTP. megatron: the trainer "
        "(of either backend) loads it from --opd-teacher-load",
    )
    opd_kl_coef: float = flag(1.0, help="Coefficient of the reverse KL divergence from the teacher (--use-opd)")
    opd_teacher_load: str | None = path_flag(
        "Checkpoint of the teacher for --opd-type megatron, with the architecture of the trained model"
    )
    opd_teacher_ckpt_step: int | None = flag(
        None,
        low=0,
        help="Iteration of the teacher's checkpoint",
        status="refused",
        reason="name the folder of that iteration with --opd-teacher-load",
    )


def derive_corrections(args: Args, asynchronous: bool) -> None:
    if args.kl_loss_type is None:
        args.kl_loss_type = "k1" if args.kl_coef != 0 else "low_var_kl"
    if args.use_rollout_routing_replay:
        args.use_routing_replay = True
    if args.use_tis is None:
        _correct_by_default(args, asynchronous)


def _correct_by_default(args: Args, asynchronous: bool) -> None:
    """Turn on TIS if samples come from quantized weights, or can be older than the weights that they train, unless the
    user chose another way."""
    rejects = vars(args).get("use_rs")  # of --custom-config-path: samples are left out instead
    chosen = args.use_rollout_logprobs or args.get_mismatch_metrics or rejects
    bound = staleness_bound(args.async_buffer_size, args.update_weights_interval, args.max_weight_staleness)
    why = ""
    if args.rollout_quantization:
        quantization = f"--rollout-quantization {args.rollout_quantization}"
        why = f"the engines generate with weights that {quantization} has rounded"
    elif asynchronous and bound > 0:
        why = f"tokens can be {bound} step(s) older than the weights that they train"
    elif trains_late(args) and not args.mask_offpolicy_in_partial_rollout:  # which excludes such tokens
        why = (
            "with --over-sampling-batch-size or --partial-rollout, groups that a rollout does not need train in a "
            "later one, so their tokens are older than the weights that they train"
        )
    args.use_tis = bool(why) and args.loss_type == "policy_loss" and not chosen
    if args.use_tis:
        args.notices.append(f"--use-tis is on: {why} (off: --no-use-tis)")


def check_kl(args: Args) -> list[str]:
    problems = []
    if args.loss_type == "sft_loss":
        terms = {name: getattr(args, name) for name in ("use_kl_loss", "kl_loss_coef", "kl_coef", "entropy_coef")}
        idle = ", ".join(f"--{name.replace('_', '-')}" for name, value in terms.items() if value)
        return [f"--loss-type sft_loss has neither a KL nor an entropy term: leave out {idle}"] if idle else []
    if args.kl_coef != 0 and args.kl_loss_coef != 0:
        problems.append(
            f"--kl-coef {args.kl_coef} (KL in the reward) and --kl-loss-coef {args.kl_loss_coef} (KL in the loss) "
            "exclude each other: remove one"
        )
    if args.kl_loss_coef != 0 and not args.use_kl_loss:
        problems.append(f"--kl-loss-coef {args.kl_loss_coef} needs --use-kl-loss")
    if args.use_kl_loss and args.kl_loss_coef == 0:
        args.notices.append(
            "--use-kl-loss with --kl-loss-coef 0 does not change the training; it only logs train/kl_loss, which costs "
            "a copy of the reference weights and a forward pass per rollout: remove it if you do not need the metric"
        )
    if args.kl_loss_type == "k1" and args.kl_loss_coef != 0 and not args.use_unbiased_kl:
        args.notices.append(
            "--kl-loss-type k1 in the loss does not regularize: its expected gradient is 0 for samples of the policy "
            "itself; use low_var_kl or k2, or add --use-unbiased-kl"
        )
    return problems


def check_off_policy(args: Args) -> list[str]:
    problems = []
    if args.use_rollout_logprobs and args.use_tis:
        problems.append(
            "--use-rollout-logprobs uses the engine's log-probs as the old policy, so --use-tis has nothing to "
            "correct: remove one"
        )
    if args.get_mismatch_metrics and not args.custom_tis_function_path:
        problems.append("--get-mismatch-metrics needs --custom-tis-function-path, which computes these metrics")
    if vars(args).get("use_rs") and not args.custom_tis_function_path:
        problems.append(
            "use_rs of --custom-config-path needs --custom-tis-function-path slime.algorithms.mis.compute_mis_weights: "
            "the default function rejects nothing"
        )
    if args.tis_clip <= args.tis_clip_low:
        problems.append(f"--tis-clip {args.tis_clip} must be above --tis-clip-low {args.tis_clip_low}")
    return problems


def check_opsm(args: Args, asynchronous: bool) -> list[str]:
    """Warn if OPSM cannot mask anything.

    OPSM masks sequences by the drift between the policy and the old policy. With one optimizer step per rollout the two
    are equal, unless the old log-probs come from other weights: from the engine, or with ``--keep-old-actor`` from the
    weights that generated the samples. In the synchronous loop these are the weights that training starts from, so
    there ``--keep-old-actor`` adds no drift.
    """
    behind = asynchronous and args.keep_old_actor and old_actor_lag(args) == 1
    if args.use_opsm and args.num_steps_per_rollout == 1 and not args.use_rollout_logprobs and not behind:
        args.notices.append(
            "--use-opsm masks nothing: with one optimizer step per rollout, the policy equals the old policy; use "
            "--num-steps-per-rollout 2 or more, the engine's log-probs as the old policy (--use-rollout-logprobs), "
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
