"""Advantages and returns of one rollout, before its first training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from slime.algorithms.algorithm import Algorithm, custom_setting
from slime.algorithms.losses import compute_approx_kl, distilled_advantages, reverse_kl
from slime.algorithms.mis import MisConfig, mean_weight
from slime.algorithms.reinforce_plus_plus import normalize_advantages
from slime.algorithms.sequences import Reduce, flatten, keep_where
from slime.config.algorithm import create_algorithm
from slime.config.args import Args
from slime.config.hooks import load_function
from slime.data.fields import RankBatch, on_hook_names

T = TypeVar("T")


@dataclass(frozen=True)
class AdvantageSettings:
    """What :func:`compute_advantages` does in addition to the formula of the estimator."""

    enabled: bool
    """False with ``--disable-compute-advantages-and-returns``."""
    algorithm: Algorithm
    custom: Callable[[Args, dict[str, Any]], None] | None
    """The function of ``--custom-advantage-function-path``, which replaces the estimator's
    formula.
    """
    kl_coef: float
    kl_type: str
    use_rollout_logprobs: bool
    distillation_coef: float | None
    """``--opd-kl-coef``; None without ``--use-opd``."""
    normalize: bool
    weights_to_average: MisConfig | None
    """How importance weights are computed, if the loss divides them by their mean over the rollout
    (``tis_batch_normalize``); otherwise None."""
    args: Args
    """For the custom function only."""

    @classmethod
    def from_args(cls, args: Args) -> AdvantageSettings:
        path = args.custom_advantage_function_path
        averages = args.use_tis and custom_setting(args, "tis_batch_normalize", False)
        return cls(
            enabled=args.compute_advantages_and_returns,
            algorithm=create_algorithm(args),
            custom=on_hook_names(load_function(path)) if path else None,
            kl_coef=args.kl_coef,
            kl_type=args.kl_loss_type,
            use_rollout_logprobs=args.use_rollout_logprobs,
            distillation_coef=args.opd_kl_coef if args.use_opd else None,
            normalize=args.normalize_advantages,
            weights_to_average=MisConfig.from_args(args) if averages else None,
            args=args,
        )

    def for_critic(self) -> AdvantageSettings:
        """Return the settings for the critic.

        Its returns are those of the actor: of the same rewards, with the same KL penalty
        (``--kl-coef``), for which it gets the actor's log-probs. Everything else changes only the
        advantages of the actor.
        """
        return replace(
            self, custom=None, distillation_coef=None, normalize=False, weights_to_average=None
        )


def compute_advantages(settings: AdvantageSettings, batch: RankBatch, reduce: Reduce) -> None:
    """Set ``advantages``, ``returns`` and ``kl`` (per sample ``[response_length]``) in the batch.

    The steps are, in this order: the KL to the reference (0 if ``--kl-coef`` is 0); the estimator
    or the custom function; the distillation term, which also sets ``opd_reverse_kl``; whitening;
    and the mean importance weight (``mis_weight_mean``) if the loss divides by it.

    ``old_log_probs`` may be absent unless one of these steps needs them. The loss then uses the
    current log-probs.

    Args:
        batch: A rank batch (``slime.data.fields``) over *whole* responses. A context-parallel
            backend gathers them first.
        reduce: Its ``over_data`` must count each of these responses once.

    Raises:
        ValueError: An entry that the flags need is missing (the message names both), advantages or
            returns do not have the shapes of the responses, or those of a custom function are not
            finite.
    """
    if not settings.enabled:
        return
    batch["kl"] = _kl_to_reference(settings, batch)
    if settings.custom is None:
        own, batch["returns"] = settings.algorithm.advantages(batch)
        batch["advantages"] = settings.algorithm.over_ranks(batch, own, reduce)
        _check_shapes(batch, f"{type(settings.algorithm).__name__}.advantages")
    else:
        settings.custom(settings.args, batch)
        what = f"--custom-advantage-function-path {settings.args.custom_advantage_function_path}"
        _check_shapes(batch, what)
        values = flatten([torch.as_tensor(x) for x in batch["advantages"]])
        if not keep_where(flatten(batch["loss_masks"]).to(values.device), values).isfinite().all():
            raise ValueError(
                f"{what} set an advantage that is NaN or infinite: does it divide by 0?"
            )
    if settings.distillation_coef is not None:
        _add_distillation(settings, settings.distillation_coef, batch)
    if settings.normalize:
        # Whitening comes after the distillation term, because it must scale the advantages that the
        # loss uses.
        batch["advantages"] = normalize_advantages(batch["advantages"], batch["loss_masks"], reduce)
    if settings.weights_to_average is not None:
        batch["mis_weight_mean"] = _mean_weight(settings.weights_to_average, batch, reduce)


def _policy_log_probs(settings: AdvantageSettings, batch: RankBatch) -> list[Tensor] | None:
    """Return log π_old as the loss uses it: from the engine, recomputed, or None for the current
    log-probs.
    """
    if settings.use_rollout_logprobs and batch.get("rollout_log_probs") is not None:
        return batch["rollout_log_probs"]
    return batch.get("old_log_probs")


def _kl_to_reference(settings: AdvantageSettings, batch: RankBatch) -> list[Tensor]:
    if settings.kl_coef == 0:
        return [
            torch.zeros(length, dtype=torch.float32, device=mask.device)
            for length, mask in zip(batch["response_lengths"], batch["loss_masks"], strict=True)
        ]
    why = f"--kl-coef {settings.kl_coef}"
    log_probs = _require(_policy_log_probs(settings, batch), "old log-probs (old_log_probs)", why)
    ref = _require(batch.get("ref_log_probs"), "ref_log_probs", why)
    return [compute_approx_kl(p, q, settings.kl_type) for p, q in zip(log_probs, ref, strict=True)]


def _check_shapes(batch: RankBatch, what: str) -> None:
    for name in ("advantages", "returns"):
        shapes = [tuple(torch.as_tensor(x).shape) for x in _require(batch.get(name), name, what)]
        if shapes != [(length,) for length in batch["response_lengths"]]:
            raise ValueError(
                f"{what} set {name} with shapes {shapes}; the responses have the lengths "
                f"{batch['response_lengths']}"
            )


def _add_distillation(settings: AdvantageSettings, coefficient: float, batch: RankBatch) -> None:
    student = _require(
        _policy_log_probs(settings, batch), "old log-probs (old_log_probs)", "--use-opd"
    )
    teacher = _require(batch.get("teacher_log_probs"), "teacher_log_probs", "--use-opd")
    kl = [
        reverse_kl(s, t, m) for s, t, m in zip(student, teacher, batch["loss_masks"], strict=True)
    ]
    batch["opd_reverse_kl"] = kl
    batch["advantages"] = [
        distilled_advantages(a, k, coefficient)
        for a, k in zip(batch["advantages"], kl, strict=True)
    ]


def _mean_weight(config: MisConfig, batch: RankBatch, reduce: Reduce) -> float:
    # The mean is computed once, over the whole rollout. With a mean per micro-batch, the loss would
    # depend on how samples are packed.
    train = flatten(_require(batch.get("old_log_probs"), "old_log_probs", "tis_batch_normalize"))
    rollout = flatten(
        _require(batch.get("rollout_log_probs"), "rollout_log_probs", "tis_batch_normalize")
    )
    mask = flatten(batch["loss_masks"])
    difference = keep_where(mask, train - rollout)
    return mean_weight(
        config, difference, mask.to(train.dtype), list(batch["response_lengths"]), reduce
    )


def _require(value: T | None, what: str, why: str) -> T:
    if value is None:
        raise ValueError(f"{why} needs {what}, which the batch does not have")
    return value
