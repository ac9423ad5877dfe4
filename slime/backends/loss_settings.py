"""The settings of the loss, read from the flags once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from slime.algorithms.algorithm import Algorithm, custom_setting
from slime.algorithms.off_policy import TisResult, vanilla_tis_function
from slime.algorithms.sequences import Reducer
from slime.config.algorithm import create_algorithm
from slime.config.args import Args
from slime.config.hooks import load_function

LOSS_TYPES = ("policy_loss", "value_loss", "sft_loss", "custom_loss")


@dataclass(frozen=True)
class LossSettings:
    """The settings of :func:`compute_loss`, read from the flags once."""

    loss_type: str
    algorithm: Algorithm
    per_token: bool
    """``--calculate-per-token-loss``."""
    entropy_coef: float
    kl: KlLoss | None
    """None without ``--use-kl-loss``."""
    use_rollout_logprobs: bool
    opsm_delta: float | None
    """None without ``--use-opsm``."""
    correction: Correction | None
    """None if there is neither a correction for the engine's probabilities nor a measurement of the mismatch."""
    value_clip: float
    pg_reducer: Callable[..., Reducer] | None
    """The function of ``--custom-pg-loss-reducer-function-path``."""
    custom_loss: Callable[..., tuple[Tensor, Mapping[str, object]]] | None
    """The function of ``--custom-loss-function-path``."""
    args: Args
    """For custom functions only."""

    @property
    def metrics_vary(self) -> bool:
        """Whether a function of the user makes metrics, which may depend on the samples of a micro-batch."""
        return self.custom_loss is not None or (self.correction is not None and self.correction.is_custom)

    @classmethod
    def from_args(cls, args: Args) -> LossSettings:
        """Read the flags. Raises ValueError if ``--loss-type`` is unknown or its function is not given."""
        if args.loss_type not in LOSS_TYPES:
            raise ValueError(f"unknown --loss-type {args.loss_type!r}: choose one of {', '.join(LOSS_TYPES)}")
        reducer, custom_loss = args.custom_pg_loss_reducer_function_path, args.custom_loss_function_path
        if args.loss_type == "custom_loss" and not custom_loss:
            raise ValueError("--loss-type custom_loss needs --custom-loss-function-path")
        return cls(
            loss_type=args.loss_type,
            algorithm=create_algorithm(args),
            per_token=args.calculate_per_token_loss,
            entropy_coef=args.entropy_coef,
            kl=KlLoss(args.kl_loss_coef, args.kl_loss_type, args.use_unbiased_kl) if args.use_kl_loss else None,
            use_rollout_logprobs=args.use_rollout_logprobs,
            opsm_delta=args.opsm_delta if args.use_opsm else None,
            correction=Correction.from_args(args),
            value_clip=args.value_clip,
            pg_reducer=load_function(reducer) if reducer else None,
            custom_loss=load_function(custom_loss) if custom_loss else None,
            args=args,
        )


@dataclass(frozen=True)
class KlLoss:
    """The settings of the KL to the reference as a term of the loss."""

    coefficient: float
    kind: str
    unbiased: bool
    """Whether to multiply the estimate by the importance ratio (``--use-unbiased-kl``)."""


@dataclass(frozen=True)
class Correction:
    """The settings of importance weights for tokens whose probabilities differ between engine and trainer."""

    function: Callable[..., TisResult]
    """The function of ``--custom-tis-function-path``; truncated importance sampling by default."""
    applies: bool
    """Whether the correction is applied. With ``--get-mismatch-metrics`` alone, the function only measures."""
    by_default: bool
    """Whether the correction is used without a flag. Then a rollout without the engine's log-probs is not corrected."""
    is_custom: bool
    """Whether the function is that of ``--custom-tis-function-path``."""

    @classmethod
    def from_args(cls, args: Args) -> Correction | None:
        applies = bool(args.use_tis or custom_setting(args, "use_rs", False))
        if not applies and not args.get_mismatch_metrics:
            return None
        path = args.custom_tis_function_path
        return cls(
            function=load_function(path) if path else vanilla_tis_function,
            applies=applies,
            by_default=bool(args.use_tis) and "use_tis" not in args.explicit,
            is_custom=bool(path),
        )
