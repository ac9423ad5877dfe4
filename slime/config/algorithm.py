"""Advantage estimators and losses: the flags, their checks, and the lookup of the estimator's
class.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime.algorithms.algorithm import Algorithm, EstimatorSettings, baseline_problem, class_problem
from slime.config.flag import (
    Section,
    flag,
    flags_of,
    hook_flag,
    is_hook_path,
    own_section,
    path_flag,
)
from slime.config.hooks import HookError, load_function
from slime.registry import find, parts

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass
class AlgorithmConfig(Section):
    _title = "algorithm"

    advantage_estimator: str = flag("grpo", kind_of_part="algorithm", or_hook=True)
    """Advantage estimator: a built-in one, or the path of the user's own class; ppo also trains a
    critic
    """
    loss_type: str = flag(
        "policy_loss", choices=("policy_loss", "sft_loss", "custom_loss"), kind_of_part="loss"
    )
    """Loss to minimise: the policy gradient loss, the SFT loss, the function in
    --custom-loss-function-path, one of preferences (docs/en/preference.md), or distill
    """
    custom_loss_function_path: str | None = hook_flag()
    """Loss function for --loss-type custom_loss"""
    custom_advantage_function_path: str | None = hook_flag()
    """Function that computes advantages instead of --advantage-estimator"""
    custom_pg_loss_reducer_function_path: str | None = hook_flag()
    """Function that averages the policy loss over tokens and samples. Default: the mean over
    samples
    """
    compute_advantages_and_returns: bool = flag(True, kind="negative")
    """Do not compute advantages and returns, as for SFT or a custom loss"""
    eps_clip: float = flag(0.2, low=0)
    """Lower clip range (epsilon) of the importance ratio in the policy loss"""
    eps_clip_high: float = flag(low=0, same_as="eps_clip")
    """Upper clip range (epsilon) of the importance ratio. Default: --eps-clip"""
    eps_clip_c: float | None = flag(above=1)
    """Constant of dual-clip PPO for tokens with negative advantage. Default: no dual clip"""
    value_clip: float = flag(0.2, low=0)
    """Clip range of the critic's values in the value loss"""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus in the loss"""
    observation_loss_coef: float = flag(0.0, low=0)
    """Coefficient of the cross-entropy on response tokens that no engine sampled, such as the
    output of tools, in the policy loss (ECHO); the paper has 0.1"""
    gamma: float = flag(1.0, low=0, high=1)
    """Discount factor (gamma) of returns"""
    lambd: float = flag(1.0, low=0, high=1)
    """Lambda of generalized advantage estimation (GAE)"""
    normalize_advantages: bool = False
    """Whiten advantages over the batch (mean 0, standard deviation 1)"""
    grpo_std_normalization: bool = flag(True, kind="negative")
    """Do not divide rewards by the standard deviation of their group, as in Dr. GRPO"""
    rewards_normalization: bool = flag(True, kind="negative")
    """Train on raw rewards, without a group baseline"""
    overlong_buffer_len: int = flag(0, low=0)
    """DAPO: number of last tokens of a response over which the overlong penalty grows; 0 disables
    it
    """
    overlong_penalty: float = 1.0
    """Maximum overlong penalty, which is subtracted from the reward of a response of
    --rollout-max-response-len tokens"""
    calculate_per_token_loss: bool = False
    """Average the loss over tokens instead of over samples"""
    num_critic_only_steps: int = flag(0, low=0)
    """Number of rollouts at the start that train only the critic"""
    use_rollout_entropy: bool = False
    """Compute the entropy of the policy in the log-prob pass, as a metric"""


def needs_critic(name: str) -> bool:
    """Whether the estimator trains a critic. One that cannot be loaded does not, and
    :func:`check_estimator` reports it later, together with all other problems.
    """
    return loading_problem(name) is None and algorithm_class(name).needs_critic


@functools.cache
def algorithm_class(name: str) -> type[Algorithm]:
    """Return the class that ``--advantage-estimator`` names. The driver, the rollout manager and
    the training ranks all use it.

    Raises:
        HookError: ``name`` is neither a built-in name nor the path of a class that derives from
            :class:`Algorithm`. Importing the user's file may raise any other exception.
    """
    known = parts("algorithm")
    if name not in known and not is_hook_path(name):
        raise HookError(
            f"--advantage-estimator {name!r} is neither one of {', '.join(known)} nor the path of "
            "your own class"
        )
    try:
        found: type[Algorithm] = find("algorithm", name) if name in known else load_function(name)
    except HookError as error:
        raise HookError(f"--advantage-estimator: {error}") from None
    if problem := class_problem(found):
        raise HookError(f"--advantage-estimator {name}: {problem}")
    return found


def registered_loss(args: AlgorithmConfig) -> Any:
    """Return the class, a ``slime.backends.loss_type.LossType``, of a loss that a plug-in brings;
    None for those of the core.
    """
    return find("loss", args.loss_type) if args.loss_type in parts("loss") else None


def create_algorithm(args: Args) -> Algorithm:
    """Create the run's estimator with its settings."""
    settings = EstimatorSettings(
        eps_clip=args.eps_clip,
        eps_clip_high=args.eps_clip if args.eps_clip_high is None else args.eps_clip_high,
        eps_clip_c=args.eps_clip_c,
        gamma=args.gamma,
        lambd=args.lambd,
        kl_coef=args.kl_coef,
        std_normalization=args.grpo_std_normalization,
        reward_weights=args.reward_weights,
        max_response_len=args.rollout_max_response_len,
        # Attributes that are not flags: the user's own settings, which a user's estimator can read.
        custom={
            name: value
            for name, value in vars(args).items()
            if name not in type(args).__dataclass_fields__
        },
        own=own_section(parts("algorithm").get(args.advantage_estimator), args),
    )
    return algorithm_class(args.advantage_estimator)(settings)


def loading_problem(name: str) -> str | None:
    """Explain why the estimator cannot be loaded; None if it can."""
    try:
        algorithm_class(name)
    except HookError as error:
        return str(error)
    # the user's module can raise anything
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return (
            f"--advantage-estimator {name}: importing it failed with {type(error).__name__}: "
            f"{error}"
        )
    return None


def trial_problem(name: str, create: Callable[[], Algorithm]) -> str | None:
    """Try the estimator's baseline on a few small groups, and explain why it fails; None if it
    works.
    """
    try:
        problem = baseline_problem(create())
    except Exception as error:  # the constructor of the user's class can raise anything
        problem = f"{type(error).__name__}: {error}"
    return f"--advantage-estimator {name}: {problem}" if problem else None


def estimator_label(name: str) -> str:
    """Return a short name for folders and plots: ``my_algo.py:MyAlgorithm`` gives
    ``MyAlgorithm``.
    """
    return Path(name).stem if name.endswith(".py") else re.split(r"[.:]", name)[-1]


def known_where(fact: str, value: bool = True) -> str:
    """List the built-in estimators whose attribute ``fact`` has a value, such as
    ``known_where("needs_critic")``.
    """
    return " or ".join(
        name for name in parts("algorithm") if getattr(find("algorithm", name), fact) is value
    )


def check_estimator(args: Args) -> list[str]:
    """Check that the estimator can be loaded, and that the other flags fit what its class requires
    and forbids.
    """
    name = args.advantage_estimator
    if problem := loading_problem(name) or trial_problem(name, lambda: create_algorithm(args)):
        return [problem]
    algorithm = algorithm_class(name)
    flags = flags_of(type(args))
    # A class of the user may name a switch that does not exist.
    unknown = [
        switch for switch in (*algorithm.requires, *algorithm.forbids) if switch not in flags
    ]
    if unknown:
        return [
            f"--advantage-estimator {name} requires or forbids {', '.join(unknown)}, which is not "
            "a flag"
        ]
    args.notices += create_algorithm(args).notices()
    problems = [
        f"--advantage-estimator {name} needs {flags[switch].option}: {reason}"
        for switch, reason in algorithm.requires.items()
        if not getattr(args, switch)
    ]
    problems += [
        f"--advantage-estimator {name} and {flags[switch].option} exclude each other: {reason}"
        for switch, reason in algorithm.forbids.items()
        if getattr(args, switch)
    ]
    return problems


@dataclass
class KlConfig(Section):
    _title = "KL to the reference"

    use_kl_loss: bool = False
    """Add the KL divergence from the reference model to the loss"""
    kl_loss_coef: float = 0.0
    """Coefficient of the KL divergence in the loss; needs --use-kl-loss"""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag()
    """Estimator of the KL divergence. Default: low_var_kl in the loss, k1 in the reward
    (--kl-coef). In the loss k1 does not regularise"""
    kl_coef: float = 0.0
    """Coefficient of the KL divergence in the reward; excludes --kl-loss-coef"""
    use_unbiased_kl: bool = False
    """Multiply the KL divergence in the loss by the importance ratio, which makes the estimate
    unbiased
    """
    ref_update_interval: int | None = flag(low=1)
    """Number of rollouts between copies of the actor to the reference model. Default: never"""


@dataclass
class OffPolicyConfig(Section):
    _title = "off-policy correction and routing replay"

    use_rollout_logprobs: bool = False
    """Use the engine's log-probs as the old policy; excludes --use-tis"""
    use_tis: bool = flag()
    """Weigh the loss of each token by the truncated importance ratio (TIS) between trainer and
    engine. Default: on with --rollout-quantization, in train_async.py, and with
    --over-sampling-batch-size or --partial-rollout"""
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
    """Megatron: route tokens in training to the same experts as in the pass that computed the old
    log-probs
    """
    use_rollout_routing_replay: bool = False
    """With SGLang: route tokens in training to the same experts as in the engine; implies
    --use-routing-replay"""


@dataclass
class DistillationConfig(Section):
    _title = "on-policy distillation"

    use_opd: bool = False
    """On-policy distillation: train on the reverse KL divergence from a teacher"""
    opd_type: Literal["sglang", "megatron"] | None = None
    """Location of the teacher for --use-opd. sglang: a server that is asked over HTTP. megatron:
    the trainer (of either backend) loads it from --opd-teacher-load"""
    opd_kl_coef: float = 1.0
    """Coefficient of the reverse KL divergence from the teacher (--use-opd)"""
    opd_teacher_load: str | None = path_flag()
    """Checkpoint of the teacher for --opd-type megatron, with the architecture of the trained
    model
    """
    opd_teacher_ckpt_step: int | None = flag(
        low=0,
        status="refused",
        reason="name the folder of that iteration with --opd-teacher-load",
    )
    """Iteration of the teacher's checkpoint"""
