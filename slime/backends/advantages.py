"""What a training rank computes from its batch before the first training step of a rollout: advantages
and returns, and the metrics of the rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime.algorithms.algorithm import Algorithm, custom_setting
from slime.algorithms.losses import compute_approx_kl, distilled_advantages, reverse_kl
from slime.algorithms.mis import MisConfig, mean_weight
from slime.algorithms.reinforce_plus_plus import normalize_advantages
from slime.algorithms.sequences import Reduce, flatten, keep_where
from slime.backends.base import Metrics, TrainBackend
from slime.backends.loss_inputs import require
from slime.config.algorithm import create_algorithm
from slime.config.args import Args
from slime.config.hooks import load_function
from slime.data.fields import BY_NAME, FIELDS, RankBatch
from slime.data.rewards import PASS_ABOVE, shares_in_rollouts


@dataclass(frozen=True)
class AdvantageSettings:
    """What :func:`compute_advantages` does in addition to the formula of the estimator."""

    enabled: bool
    """False with ``--disable-compute-advantages-and-returns``."""
    algorithm: Algorithm
    custom: Callable[..., object] | None
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
            custom=load_function(path) if path else None,
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

    ``log_probs`` may be absent unless one of these steps needs them. The loss then uses the
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
        what = f"--custom-advantage-function-path {settings.args.custom_advantage_function_path}"
        settings.custom(settings.args, batch)
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
    return batch.get("log_probs")


def _kl_to_reference(settings: AdvantageSettings, batch: RankBatch) -> list[Tensor]:
    if settings.kl_coef == 0:
        return [
            torch.zeros(length, dtype=torch.float32, device=mask.device)
            for length, mask in zip(batch["response_lengths"], batch["loss_masks"], strict=True)
        ]
    why = f"--kl-coef {settings.kl_coef}"
    log_probs = require(_policy_log_probs(settings, batch), "old log-probs (log_probs)", why)
    ref = require(batch.get("ref_log_probs"), "ref_log_probs", why)
    return [compute_approx_kl(p, q, settings.kl_type) for p, q in zip(log_probs, ref, strict=True)]


def _check_shapes(batch: RankBatch, what: str) -> None:
    for name in ("advantages", "returns"):
        shapes = [
            tuple(torch.as_tensor(x).shape)
            for x in require(batch.get(name), f"to set {name}", what)
        ]
        if shapes != [(length,) for length in batch["response_lengths"]]:
            raise ValueError(
                f"{what} set {name} with shapes {shapes}; the responses have the lengths "
                f"{batch['response_lengths']}"
            )


def _add_distillation(settings: AdvantageSettings, coefficient: float, batch: RankBatch) -> None:
    student = require(_policy_log_probs(settings, batch), "old log-probs (log_probs)", "--use-opd")
    teacher = require(batch.get("teacher_log_probs"), "teacher_log_probs", "--use-opd")
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
    train = flatten(require(batch.get("log_probs"), "log_probs", "tis_batch_normalize"))
    rollout = flatten(
        require(batch.get("rollout_log_probs"), "rollout_log_probs", "tis_batch_normalize")
    )
    mask = flatten(batch["loss_masks"])
    difference = keep_where(mask, train - rollout)
    return mean_weight(
        config, difference, mask.to(train.dtype), list(batch["response_lengths"]), reduce
    )


METRICS = tuple(field.name for field in FIELDS if field.metric)
_REWARDS = ("rewards", "raw_reward")


def rollout_metrics(backend: TrainBackend, batch: RankBatch) -> Metrics:
    """Return ``rollout/<entry>``, the mean over the samples of all ranks. For a per-token entry it
    is the mean of the samples' masked means, for a reward the mean over rollouts."""
    return _means(backend, batch, METRICS, [True] * len(batch["tokens"]), "rollout/")


def correct_sample_metrics(backend: TrainBackend, batch: RankBatch) -> Metrics:
    """Return ``rollout/correct-<entry>`` for the samples whose raw reward counts as a pass, and
    their fraction.

    This is for ``--log-correct-samples``. If no sample is correct, there are no such entries.
    """
    chosen = [float(reward) > PASS_ABOVE for reward in batch["raw_reward"]]
    shares = _shares(batch)
    right = math.fsum(share for share, correct in zip(shares, chosen, strict=True) if correct)
    correct, count = backend.reduce.total([right, math.fsum(shares)])
    names = [
        name
        for name in METRICS
        if BY_NAME[name].per != "sample" or name in ("response_lengths", "truncated")
    ]
    means = _means(backend, batch, names, chosen, "rollout/correct-")
    return {"rollout/correct_ratio": correct / max(count, 1.0), **(means if correct else {})}


def _shares(batch: RankBatch) -> list[float]:
    shares: list[float] | None = batch.get("rollout_shares")
    raw = batch["raw_reward"]
    return (
        shares_in_rollouts(batch.get("rollout_ids") or range(len(raw)), raw)
        if shares is None
        else shares
    )


def _means(
    backend: TrainBackend,
    batch: RankBatch,
    keys: Sequence[str],
    chosen: Sequence[bool],
    prefix: str,
) -> Metrics:
    # Sums of each entry over the samples of this rank, and by what they are divided: samples, or
    # rollouts for rewards.
    names = []
    numbers = []
    masks = [torch.as_tensor(mask) for mask in batch["loss_masks"]]
    for key in keys:
        if batch.get(key) is None:
            continue
        entries = [
            (x, mask) for x, mask, wanted in zip(batch[key], masks, chosen, strict=True) if wanted
        ]
        if key in _REWARDS:
            weights = [
                share for share, wanted in zip(_shares(batch), chosen, strict=True) if wanted
            ]
            # Where the share is 0, the raw reward is NaN: the verifier gave no result.
            values = [
                float(x) * share for (x, _), share in zip(entries, weights, strict=True) if share
            ]
        elif BY_NAME[key].per == "sample":
            values = [float(x) for x, _ in entries]
        else:
            tensors = ((torch.as_tensor(x), mask) for x, mask in entries if bool(mask.any()))
            values = [float(x[mask != 0].double().mean()) for x, mask in tensors]
        names.append(key)
        # Sums and counts instead of means, because ranks have different numbers of samples. One
        # collective at the end reduces all metrics.
        numbers += [sum(values), math.fsum(weights) if key in _REWARDS else float(len(values))]
    totals = backend.reduce.total(numbers)
    return {
        f"{prefix}{name}": totals[2 * i] / max(totals[2 * i + 1], 1.0)
        for i, name in enumerate(names)
    }
