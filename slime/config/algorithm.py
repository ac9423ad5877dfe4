"""Estimators, losses, KL, and what corrects for data that is not on-policy."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import flag

_LOSS = "slime/backends/loss.py"
_ADVANTAGES = "slime/algorithms/advantages.py"


@dataclass
class AlgorithmConfig:
    _title = "algorithm"

    advantage_estimator: str = flag(
        "grpo",
        choices=(
            "grpo",
            "gspo",
            "cispo",
            "rloo",
            "dr_grpo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "ppo",
        ),
        help="how rewards become advantages; ppo brings a critic",
        reader=_ADVANTAGES,
    )
    loss_type: str = flag(
        "policy_loss", choices=("policy_loss", "sft_loss", "custom_loss"), help="what is minimised", reader=_LOSS
    )
    custom_loss_function_path: str = flag(None, kind="hook", help="loss of custom_loss", reader=_LOSS)
    custom_advantage_function_path: str = flag(None, kind="hook", help="replaces the estimator", reader=_ADVANTAGES)
    custom_pg_loss_reducer_function_path: str = flag(
        None, kind="hook", help="how the policy loss is averaged", reader=_LOSS
    )
    compute_advantages_and_returns: bool = flag(
        True,
        option="--disable-compute-advantages-and-returns",
        kind="negative",
        help="no advantages (SFT, custom loss)",
        reader=_ADVANTAGES,
    )
    eps_clip: float = flag(0.2, help="lower clip distance", reader=_LOSS)
    eps_clip_high: float = flag(None, help="upper clip distance; default --eps-clip", reader=_LOSS)
    eps_clip_c: float = flag(None, help="dual-clip constant, above 1", reader=_LOSS)
    value_clip: float = flag(0.2, help="clip distance of values", reader=_LOSS)
    entropy_coef: float = flag(0.0, help="weight of the entropy bonus", reader=_LOSS)
    gamma: float = flag(1.0, help="discount", reader=_ADVANTAGES)
    lambd: float = flag(1.0, help="lambda of GAE", reader=_ADVANTAGES)
    normalize_advantages: bool = flag(False, help="whiten advantages over the whole batch", reader=_ADVANTAGES)
    grpo_std_normalization: bool = flag(
        True,
        option="--disable-grpo-std-normalization",
        kind="negative",
        help="do not divide by the group's deviation (Dr.GRPO)",
        reader="slime/data/rewards.py",
    )
    rewards_normalization: bool = flag(
        True,
        option="--disable-rewards-normalization",
        kind="negative",
        help="train on raw rewards",
        reader="slime/data/rewards.py",
    )
    overlong_buffer_len: int = flag(
        0,
        help="DAPO: rewards fall over the last so many tokens of --rollout-max-response-len; 0: they do not",
        reader="slime/data/rewards.py",
    )
    overlong_penalty: float = flag(1.0, help="how far they fall", reader="slime/data/rewards.py")
    calculate_per_token_loss: bool = flag(False, help="average over tokens instead of samples", reader=_LOSS)
    num_critic_only_steps: int = flag(0, help="rollouts that train the critic alone at the start", reader="train.py")
    use_rollout_entropy: bool = flag(False, help="entropy in the log-prob pass", reader="slime/backends/train_loop.py")


@dataclass
class KlConfig:
    _title = "KL to the reference"

    use_kl_loss: bool = flag(False, help="KL to the reference model in the loss", reader=_LOSS)
    kl_loss_coef: float = flag(0.0, help="its weight", reader=_LOSS)
    kl_loss_type: str = flag("k1", choices=("k1", "k2", "k3", "low_var_kl"), help="estimator of the KL", reader=_LOSS)
    kl_coef: float = flag(0.0, help="KL in the reward; excludes --kl-loss-coef", reader=_ADVANTAGES)
    use_unbiased_kl: bool = flag(False, help="weigh the KL by the importance ratio", reader=_LOSS)
    ref_update_interval: int = flag(None, help="copy the actor to the reference every N rollouts", reader="train.py")


@dataclass
class OffPolicyConfig:
    _title = "off-policy correction and routing replay"

    use_rollout_logprobs: bool = flag(
        False,
        help="the engine's log-probs are the old policy; excludes --use-tis",
        reader="slime/backends/train_loop.py",
    )
    use_tis: bool = flag(False, help="truncated importance weights between trainer and engine", reader=_LOSS)
    tis_clip: float = flag(2.0, help="upper bound of the weight", reader=_LOSS)
    tis_clip_low: float = flag(0.0, help="lower bound of the weight", reader=_LOSS)
    custom_tis_function_path: str = flag(None, kind="hook", help="replaces the weight (IcePop, MIS)", reader=_LOSS)
    get_mismatch_metrics: bool = flag(False, help="measure only; needs --custom-tis-function-path", reader=_LOSS)
    use_opsm: bool = flag(False, help="mask sequences that drifted from the policy", reader=_LOSS)
    opsm_delta: float = flag(1e-4, help="drift from which a sequence is masked", reader=_LOSS)
    use_routing_replay: bool = flag(False, help="replay MoE routing of the old log-prob pass", status="planned")
    use_rollout_routing_replay: bool = flag(False, help="replay MoE routing of the engine", status="planned")


@dataclass
class DistillationConfig:
    _title = "on-policy distillation"

    use_opd: bool = flag(False, help="distil from a teacher on the student's own samples", reader=_ADVANTAGES)
    opd_type: str = flag(
        None,
        choices=("sglang", "megatron"),
        help="sglang: the teacher answers over HTTP; megatron: the trainer (of any backend) holds it",
        reader="slime/rollout",
    )
    opd_kl_coef: float = flag(1.0, help="weight of the teacher", reader=_ADVANTAGES)
    opd_teacher_load: str = flag(
        None, help="teacher of --opd-type megatron: a model of the trained one's shape", reader="slime/backends/fsdp"
    )
    opd_teacher_ckpt_step: int = flag(
        None,
        help="iteration of the teacher checkpoint",
        status="refused",
        reason="name the folder of that iteration with --opd-teacher-load",
    )
