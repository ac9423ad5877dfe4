"""Estimators, losses, KL, and what corrects for data that is not on-policy."""

from __future__ import annotations

from dataclasses import dataclass

from slime.algorithms.registry import ALGORITHMS
from slime.config.flag import DERIVED, flag


@dataclass
class AlgorithmConfig:
    _title = "algorithm"

    advantage_estimator: str = flag(
        "grpo",
        choices=tuple(ALGORITHMS),
        or_hook=True,
        help="how rewards become advantages: a built-in estimator, or the path of your own class; ppo trains a critic",
    )
    loss_type: str = flag("policy_loss", choices=("policy_loss", "sft_loss", "custom_loss"), help="what is minimised")
    custom_loss_function_path: str | None = flag(None, kind="hook", help="loss of custom_loss")
    custom_advantage_function_path: str | None = flag(None, kind="hook", help="replaces the estimator")
    custom_pg_loss_reducer_function_path: str | None = flag(None, kind="hook", help="how the policy loss is averaged")
    compute_advantages_and_returns: bool = flag(
        True,
        option="--disable-compute-advantages-and-returns",
        kind="negative",
        help="no advantages (SFT, custom loss)",
    )
    eps_clip: float = flag(0.2, help="lower clip distance")
    eps_clip_high: float = flag(DERIVED, help="upper clip distance; default --eps-clip")
    eps_clip_c: float | None = flag(None, above=1, help="dual-clip constant, above 1")
    value_clip: float = flag(0.2, low=0, help="clip distance of values")
    entropy_coef: float = flag(0.0, help="weight of the entropy bonus")
    gamma: float = flag(1.0, help="discount")
    lambd: float = flag(1.0, help="lambda of GAE")
    normalize_advantages: bool = flag(False, help="whiten advantages over the whole batch")
    grpo_std_normalization: bool = flag(
        True,
        option="--disable-grpo-std-normalization",
        kind="negative",
        help="do not divide by the group's deviation (Dr.GRPO)",
    )
    rewards_normalization: bool = flag(
        True,
        option="--disable-rewards-normalization",
        kind="negative",
        help="train on raw rewards",
    )
    overlong_buffer_len: int = flag(
        0,
        help="DAPO: rewards fall over the last so many tokens of --rollout-max-response-len; 0: they do not",
    )
    overlong_penalty: float = flag(1.0, help="how far they fall")
    calculate_per_token_loss: bool = flag(False, help="average over tokens instead of samples")
    num_critic_only_steps: int = flag(0, low=0, help="rollouts that train the critic alone at the start")
    use_rollout_entropy: bool = flag(False, help="entropy in the log-prob pass")


@dataclass
class KlConfig:
    _title = "KL to the reference"

    use_kl_loss: bool = flag(False, help="KL to the reference model in the loss")
    kl_loss_coef: float = flag(0.0, help="its weight")
    kl_loss_type: str = flag(
        DERIVED,
        choices=("k1", "k2", "k3", "low_var_kl"),
        help="estimator of the KL; default: low_var_kl in the loss, k1 in the reward (--kl-coef). In the loss the "
        "expected gradient of k1 is 0, so it does not regularise",
    )
    kl_coef: float = flag(0.0, help="KL in the reward; excludes --kl-loss-coef")
    use_unbiased_kl: bool = flag(False, help="weigh the KL by the importance ratio")
    ref_update_interval: int | None = flag(None, low=1, help="copy the actor to the reference every N rollouts")


@dataclass
class OffPolicyConfig:
    _title = "off-policy correction and routing replay"

    use_rollout_logprobs: bool = flag(
        False,
        help="the engine's log-probs are the old policy; excludes --use-tis",
    )
    use_tis: bool = flag(
        DERIVED,
        help="truncated importance weights between trainer and engine; default: on where train_async.py trains tokens "
        "of older weights",
    )
    tis_clip: float = flag(2.0, help="upper bound of the weight")
    tis_clip_low: float = flag(0.0, help="lower bound of the weight")
    custom_tis_function_path: str | None = flag(None, kind="hook", help="replaces the weight (IcePop, MIS)")
    get_mismatch_metrics: bool = flag(False, help="measure only; needs --custom-tis-function-path")
    use_opsm: bool = flag(False, help="mask sequences that drifted from the policy")
    opsm_delta: float = flag(1e-4, low=0, help="drift from which a sequence is masked")
    use_routing_replay: bool = flag(
        False, help="Megatron: experts are chosen as in the pass that computed the old log-probs"
    )
    use_rollout_routing_replay: bool = flag(
        False, help="Megatron with SGLang: experts are chosen as the engine chose them; implies --use-routing-replay"
    )


@dataclass
class DistillationConfig:
    _title = "on-policy distillation"

    use_opd: bool = flag(False, help="distil from a teacher on the student's own samples")
    opd_type: str | None = flag(
        None,
        choices=("sglang", "megatron"),
        help="sglang: the teacher answers over HTTP; megatron: the trainer (of any backend) holds it",
    )
    opd_kl_coef: float = flag(1.0, help="weight of the teacher")
    opd_teacher_load: str | None = flag(None, help="teacher of --opd-type megatron: a model of the trained one's shape")
    opd_teacher_ckpt_step: int | None = flag(
        None,
        low=0,
        help="iteration of the teacher checkpoint",
        status="refused",
        reason="name the folder of that iteration with --opd-teacher-load",
    )
