"""Advantages and returns of one rollout, before its first training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .distillation import distilled_advantages, reverse_kl
from .kl import compute_approx_kl
from .mis import MisConfig, mean_weight
from .reduce import Reduce
from .registry import get_algorithm
from .sequences import flatten, keep_where
from .whitening import normalize_advantages


def compute_advantages(
    args: Any, batch: dict[str, Any], reduce: Reduce, custom: Callable[[Any, dict[str, Any]], None] | None = None
) -> None:
    """Set ``advantages``, ``returns`` and ``kl`` (per sample ``[response_length]``) in the batch.

    In this order: KL to the reference (0 when ``--kl-coef`` is 0); the estimator, or ``custom``; the
    distillation term (sets ``opd_reverse_kl``); whitening; and the mean importance weight
    (``mis_weight_mean``) where the loss will divide by it.

    Log-probs that were not recomputed (``log_probs`` absent: the loss takes the current ones) are fine
    unless one of these steps needs them.

    Args:
        batch: a rank batch (``slime.backends.base``) over *whole* responses: a context-parallel
            backend gathers them first.
        reduce: ``over_data`` must count each of those responses once.
        custom: the function of ``--custom-advantage-function-path``; sets ``advantages`` and ``returns``.

    Raises:
        ValueError: an entry that the flags call for is missing; the message names both.
    """
    if not args.compute_advantages_and_returns:
        return
    batch["kl"] = _kl_to_reference(args, batch)
    if custom is not None:
        _check_custom(args, batch, custom)
    else:
        batch["advantages"], batch["returns"] = get_algorithm(args.advantage_estimator).compute(args, batch)
    if args.use_opd:
        _add_distillation(args, batch)
    if args.normalize_advantages:
        batch["advantages"] = normalize_advantages(batch["advantages"], batch["loss_masks"], reduce)
    if getattr(args, "tis_batch_normalize", False) and args.use_tis:
        batch["mis_weight_mean"] = _mis_weight_mean(args, batch, reduce)


def policy_log_probs(args: Any, batch: dict[str, Any]) -> list[Tensor] | None:
    """log π_old as training will use it: the engine's, the recomputed ones, or None (the current ones)."""
    if args.use_rollout_logprobs and batch.get("rollout_log_probs") is not None:
        return batch["rollout_log_probs"]
    return batch.get("log_probs")


def _kl_to_reference(args: Any, batch: dict[str, Any]) -> list[Tensor]:
    if args.kl_coef == 0:
        return [
            torch.zeros(length, dtype=torch.float32, device=mask.device)
            for length, mask in zip(batch["response_lengths"], batch["loss_masks"], strict=True)
        ]
    log_probs = _require(policy_log_probs(args, batch), "old log-probs (log_probs)", f"--kl-coef {args.kl_coef}")
    ref = _require(batch.get("ref_log_probs"), "ref_log_probs", f"--kl-coef {args.kl_coef}")
    return [compute_approx_kl(p, q, args.kl_loss_type) for p, q in zip(log_probs, ref, strict=True)]


def _check_custom(args: Any, batch: dict[str, Any], custom: Callable[[Any, dict[str, Any]], None]) -> None:
    what = f"--custom-advantage-function-path {args.custom_advantage_function_path}"
    custom(args, batch)
    for name in ("advantages", "returns"):
        lengths = [len(x) for x in _require(batch.get(name), name, what)]
        if lengths != list(batch["response_lengths"]):
            raise ValueError(f"{what} set {name} with lengths {lengths}; responses have {batch['response_lengths']}")


def _add_distillation(args: Any, batch: dict[str, Any]) -> None:
    student = _require(policy_log_probs(args, batch), "old log-probs (log_probs)", "--use-opd")
    teacher = _require(batch.get("teacher_log_probs"), "teacher_log_probs", "--use-opd")
    kl = [reverse_kl(s, t, m) for s, t, m in zip(student, teacher, batch["loss_masks"], strict=True)]
    batch["opd_reverse_kl"] = kl
    batch["advantages"] = [
        distilled_advantages(a, k, args.opd_kl_coef) for a, k in zip(batch["advantages"], kl, strict=True)
    ]


def _mis_weight_mean(args: Any, batch: dict[str, Any], reduce: Reduce) -> float:
    train = flatten(_require(batch.get("log_probs"), "log_probs", "tis_batch_normalize"))
    rollout = flatten(_require(batch.get("rollout_log_probs"), "rollout_log_probs", "tis_batch_normalize"))
    mask = flatten(batch["loss_masks"])
    lengths = list(batch["response_lengths"])
    return mean_weight(
        MisConfig.from_args(args), keep_where(mask, train - rollout), mask.to(train.dtype), lengths, reduce
    )


def _require(value: Any, what: str, why: str) -> Any:
    if value is None:
        raise ValueError(f"{why} needs {what} in the batch, and it is not there")
    return value
