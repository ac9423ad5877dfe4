"""Flags of the KL divergence to the reference model, of off-policy correction, and of on-policy distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.flag import DERIVED, flag, hook_flag, path_flag
from slime.config.rollout import staleness_bound, trains_late

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass
class KlConfig:
    _title = "KL to the reference"

    use_kl_loss: bool = False
    """Add the KL divergence from the reference model to the loss"""
    kl_loss_coef: float = 0.0
    """Coefficient of the KL divergence in the loss; needs --use-kl-loss"""
    kl_loss_type: str = flag(DERIVED, choices=("k1", "k2", "k3", "low_var_kl"))
    """Estimator of the KL divergence. Default: low_var_kl in the loss, k1 in the reward (--kl-coef). In the loss k1
    does not regularise"""
    kl_coef: float = 0.0
    """Coefficient of the KL divergence in the reward; excludes --kl-loss-coef"""
    use_unbiased_kl: bool = False
    """Multiply the KL divergence in the loss by the importance ratio, which makes the estimate unbiased"""
    ref_update_interval: int | None = flag(None, low=1)
    """Number of rollouts between copies of the actor to the reference model. Default: never"""


@dataclass
class OffPolicyConfig:
    _title = "off-policy correction and routing replay"

    use_rollout_logprobs: bool = False
    """Use the engine's log-probs as the old policy; excludes --use-tis"""
    use_tis: bool = flag(DERIVED)
    """Weigh the loss of each token by the truncated importance ratio (TIS) between trainer and engine. Default: on
    with --rollout-quantization, in train_async.py, and with --over-sampling-batch-size or --partial-rollout"""
    tis_clip: float = 2.0
    """Upper bound of the truncated importance ratio (--use-tis)"""
    tis_clip_low: float = flag(0.0, low=0)
    """Lower bound of the truncated importance ratio (--use-tis)"""
    custom_tis_function_path: str | None = hook_flag()
    """Function that computes the importance weights of --use-tis, such as IcePop or MIS"""
    get_mismatch_metrics: bool = False
    """Only log the mismatch of trainer and engine; needs --custom-tis-function-path"""
    use_opsm: bool = False
    """Mask sequences with negative advantage from which the policy has drifted (OPSM)"""
    opsm_delta: float = flag(1e-4, low=0)
    """Mean log-prob difference per token above which --use-opsm masks a sequence"""
    use_routing_replay: bool = False
    """Megatron: route tokens in training to the same experts as in the pass that computed the old log-probs"""
    use_rollout_routing_replay: bool = False
    """Megatron with SGLang: route tokens in training to the same experts as in the engine; implies
    --use-routing-replay"""


@dataclass
class DistillationConfig:
    _title = "on-policy distillation"

    use_opd: bool = False
    """On-policy distillation: train on the reverse KL divergence from a teacher"""
    opd_type: str | None = flag(None, choices=("sglang", "megatron"))
    """Location of the teacher for --use-opd. sglang: a server that is asked over HTTP. megatron: the trainer (of
    either backend) loads it from --opd-teacher-load"""
    opd_kl_coef: float = 1.0
    """Coefficient of the reverse KL divergence from the teacher (--use-opd)"""
    opd_teacher_load: str | None = path_flag()
    """Checkpoint of the teacher for --opd-type megatron, with the architecture of the trained model"""
    opd_teacher_ckpt_step: int | None = flag(
        None, low=0, status="refused", reason="name the folder of that iteration with --opd-teacher-load"
    )
    """Iteration of the teacher's checkpoint"""


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
