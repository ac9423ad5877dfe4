"""The loss that all training backends use.

A loss is a sum of named parts. Each part is a coefficient times a per-token tensor, reduced to a
scalar. The loss and every metric are *shares* of the micro-batch: their plain sum over all
micro-batches and ranks of an optimizer step is the value for the step, and the same holds for the
gradient. The exceptions are metrics whose names end with ``_max``, which are combined by maximum.

Default (mean per rollout): Σ_i Σ_t m·x / max(mask sum of the whole rollout, 1) / num_rollouts.
``--calculate-per-token-loss``: Σ m·x / num_tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from slime.algorithms.algorithm import Algorithm
from slime.algorithms.losses import compute_approx_kl, compute_sft_loss, compute_value_loss
from slime.algorithms.off_policy import opsm_mask
from slime.algorithms.sequences import (
    IDENTITY,
    Reduce,
    Reducer,
    exp_ratio,
    rollout_mean_reducer,
    sequence_sums,
    token_sum_reducer,
)
from slime.backends.loss_inputs import LossSettings, TokenBatch, require

Metrics = dict[str, Tensor]
T = TypeVar("T")

WEIGHT = "/weight"
"""The suffix of the weight of a metric ``name`` that is a mean over the tokens of one kind. After
the sum over micro-batches and ranks, the metric is divided by its weight."""

LOSS_METRICS = ("loss", "pg_loss", "pg_clipfrac", "value_loss", "value_clipfrac")
"""The metrics to which a sample that is skipped because its advantages are 0 contributes 0. All
others are diagnostics. The KL is one too, because samples are skipped only if its coefficient is
0."""


class LossSum(NamedTuple):
    """Sums over the rollouts (or tokens) of the micro-batch, before the division by the count of
    the step.
    """

    loss: Tensor
    metrics: Metrics


class Part(NamedTuple):
    """One term of the loss, which is ``coefficient * value``. Its metric is ``value``."""

    coefficient: float
    value: Tensor


def compute_loss(
    settings: LossSettings,
    tokens: TokenBatch,
    *,
    num_rollouts: float,
    num_tokens: float,
    reduce: Reduce = IDENTITY,
) -> tuple[Tensor, Metrics]:
    """Compute the share of a micro-batch in the loss and metrics of the step.

    Args:
        settings: Its ``loss_type`` selects the loss. If the batch has values (of the critic), it is
            the value loss.
        num_rollouts: The number of rollouts in the whole step, over all ranks
            (``global_batch_sizes[step]``).
        num_tokens: Σ max(mask sum, 1) of the step, over all ranks (``global_token_counts[step]``).
        reduce: Its ``over_sequence`` sums over a context-parallel group. ``over_data`` is not used,
            because ranks may have different micro-batches.

    Returns:
        The loss, a scalar with gradient (0 with a gradient path if all tokens are masked), and the
        metrics, which are detached scalars.

    Raises:
        ValueError: A tensor that the flags need is missing or has a wrong length.
    """
    kind = "value_loss" if tokens.values is not None else settings.loss_type
    compute = LOSSES[kind] if settings.registered is None else _registered_loss
    loss, metrics = compute(settings, tokens.cleaned(), reduce)
    # The divisor is that of the whole step, not of this micro-batch. So the shares add up to the
    # same loss and gradient for every division of the samples into micro-batches and ranks.
    count = max(float(num_tokens if settings.per_token else num_rollouts), 1.0)
    shares = {
        name: x.detach() if is_max_metric(name) else x.detach() / count
        for name, x in metrics.items()
    }
    return loss / count, {"loss": loss.detach() / count} | shares


def is_max_metric(name: str) -> bool:
    """Return whether a metric is combined over micro-batches and ranks by maximum instead of
    sum.
    """
    return name.endswith("_max")


def divide_by_weights(metrics: Mapping[str, float]) -> dict[str, float]:
    """Compute means over tokens of one kind (:data:`WEIGHT`) from the totals of a step. Kinds
    without tokens are omitted."""
    return {
        name: value / metrics[name + WEIGHT] if name + WEIGHT in metrics else value
        for name, value in metrics.items()
        if not name.endswith(WEIGHT) and metrics.get(name + WEIGHT, 1.0) != 0
    }


def rescale_diagnostics(metrics: Mapping[str, float], trained_share: float) -> dict[str, float]:
    """Correct the diagnostics of a step for samples that were skipped
    (``TrainNeeds.skips_zero_advantages``).

    Parts of the loss need no correction, because a skipped sample adds 0. Diagnostics (entropy, KL,
    mismatch) become means over the rollouts that were trained.

    Args:
        metrics: The totals of the step.
        trained_share: The trained part of the rollouts of the step (of its tokens with
            ``--calculate-per-token-loss``).
    """
    if trained_share <= 0:
        return dict(metrics)
    return {
        k: v if k in LOSS_METRICS or is_max_metric(k) else v / trained_share
        for k, v in metrics.items()
    }


def _sum_parts(parts: Mapping[str, Part]) -> LossSum:
    # A part with coefficient 0 is only a metric. It must not be in the sum: 0 times an infinite KL
    # is NaN, and then the whole gradient would be NaN.
    loss = torch.stack(
        [part.coefficient * part.value for part in parts.values() if part.coefficient != 0]
    ).sum()
    return LossSum(loss, {name: part.value for name, part in parts.items()})


def _mean(settings: LossSettings, tokens: TokenBatch, mask: Tensor) -> Reducer:
    """Return the reduction of the run for the tokens in ``mask``: over rollouts or over tokens."""
    if settings.per_token:
        return token_sum_reducer(mask)
    return rollout_mean_reducer(mask, tokens.rollout_mask_sums, tokens.response_lengths)


# --- policy loss -------------------------------------------------------------------------------


def _policy_loss(settings: LossSettings, tokens: TokenBatch, reduce: Reduce) -> LossSum:
    log_probs = require(tokens.log_probs, "log_probs", "the policy loss")
    advantages = require(tokens.advantages, "advantages", "the policy loss")
    algorithm = settings.algorithm.of_samples(tokens.sample_entries)
    lengths = tokens.response_lengths
    mean_for_metrics = _mean(settings, tokens, tokens.loss_mask)

    # π_old. If it was not recomputed, the policy has not changed yet. With the current log-probs
    # without gradient, the ratio is 1 and its gradient is that of log π.
    trainer_old = log_probs.detach() if tokens.old_log_probs is None else tokens.old_log_probs
    engine_old = tokens.rollout_log_probs if settings.use_rollout_logprobs else None
    old = trainer_old if engine_old is None else engine_old

    # Ratio and clip.
    ppo_kl = algorithm.ppo_kl(log_probs, old, tokens.loss_mask, lengths, reduce)
    pg_loss, clipfrac = algorithm.sequence_loss(
        ppo_kl, log_probs, advantages, tokens.loss_mask, lengths, reduce
    )
    importance_ratio = exp_ratio(-ppo_kl.detach())
    metrics: Metrics = {
        "ppo_kl": mean_for_metrics(ppo_kl),
        "ois": mean_for_metrics(importance_ratio),
    }

    # Masks and weights. A rejected token is removed from the sum, but the divisor of the mean still
    # counts it. Otherwise the remaining tokens of a response with many rejected tokens would get a
    # larger weight.
    if settings.opsm_delta is not None:
        keep = opsm_mask(
            settings.opsm_delta, log_probs, old, advantages, tokens.loss_mask, lengths, reduce
        )
        pg_loss = pg_loss * keep
        metrics["opsm_clipfrac"] = mean_for_metrics(1 - keep)
    pg_loss, mask, weight_metrics = _correct_off_policy(
        settings, tokens, pg_loss, trainer_old, reduce
    )
    metrics |= {name: mean_for_metrics(x) for name, x in weight_metrics.items()}
    metrics |= _engine_gap(tokens, trainer_old, mean_for_metrics)
    if tokens.opd_reverse_kl is not None:
        metrics["opd_reverse_kl"] = mean_for_metrics(tokens.opd_reverse_kl)

    # Mean, and the other terms of the sum.
    mean = _mean(settings, tokens, mask)
    parts = {"pg_loss": Part(1.0, _pg_reducer(settings, algorithm, tokens, mask, mean)(pg_loss))}
    parts |= _entropy_part(settings, tokens, mean) | _kl_part(
        settings, tokens, log_probs, old, mean
    )
    parts |= _observation_part(settings, tokens, reduce)
    loss, part_metrics = _sum_parts(parts)
    return LossSum(loss, part_metrics | {"pg_clipfrac": mean(clipfrac)} | metrics)


def _entropy_part(settings: LossSettings, tokens: TokenBatch, mean: Reducer) -> dict[str, Part]:
    if tokens.entropy is None:
        if settings.entropy_coef != 0:
            raise ValueError(
                f"--entropy-coef {settings.entropy_coef} needs TokenBatch.entropy, which is missing"
            )
        return {}
    return {"entropy_loss": Part(-settings.entropy_coef, mean(tokens.entropy))}


def _kl_part(
    settings: LossSettings, tokens: TokenBatch, log_probs: Tensor, old: Tensor, mean: Reducer
) -> dict[str, Part]:
    if settings.kl is None:
        return {}
    ref = require(tokens.ref_log_probs, "ref_log_probs", "--use-kl-loss")
    # The tokens were sampled from the old policy. Multiplied by the ratio, the estimate and its
    # gradient are those for the policy that is trained.
    ratio = exp_ratio(log_probs - old) if settings.kl.unbiased else None
    return {
        "kl_loss": Part(
            settings.kl.coefficient,
            mean(compute_approx_kl(log_probs, ref, settings.kl.kind, ratio)),
        )
    }


def _observation_part(
    settings: LossSettings, tokens: TokenBatch, reduce: Reduce
) -> dict[str, Part]:
    """Return ECHO's term: the cross-entropy on tokens that nobody sampled, as the sum over samples
    of the mean over such tokens of each.
    """
    mask, log_probs = tokens.observation_masks, tokens.observation_log_probs
    if settings.observation_coef == 0 or mask is None or log_probs is None:
        return {}
    if settings.per_token:
        mean = token_sum_reducer(mask)
    else:
        counts = reduce.over_sequence(sequence_sums(mask, tokens.response_lengths))
        mean = rollout_mean_reducer(mask, counts, tokens.response_lengths)
    return {"observation_loss": Part(settings.observation_coef, mean(compute_sft_loss(log_probs)))}


def _engine_gap(tokens: TokenBatch, train: Tensor, reducer: Reducer) -> Metrics:
    """Compare the trainer's log-probs with those of the engine.

    Returns the mean and maximum of the absolute difference, and the k3 estimate of KL(engine ‖
    trainer).
    """
    if tokens.rollout_log_probs is None:
        return {}
    # Both are log-probs of the same tokens and would ideally be equal. Differences come from the
    # numerics of the engine, from another weight version, or from tokens that the engine sampled
    # from a restricted vocabulary.
    difference = train - tokens.rollout_log_probs
    gap = difference.abs()
    by_age: Metrics = {}
    for name, of_age in _ages(tokens):
        by_age |= {name: reducer(gap * of_age), name + WEIGHT: reducer(of_age)}
    return by_age | {
        "train_rollout_logprob_abs_diff": reducer(gap),
        "train_rollout_logprob_abs_diff_max": gap.max() if gap.numel() else gap.new_zeros(()),
        "train_rollout_k3": reducer(
            compute_approx_kl(-difference, torch.zeros_like(difference), "k3")
        ),
    }


def _ages(tokens: TokenBatch) -> list[tuple[str, Tensor]]:
    """Return a mask of the tokens of each age: from the weights that are trained, one step old, and
    older.
    """
    age = tokens.staleness
    if age is None:
        return []
    kinds = {"0": age == 0, "1": age == 1, "2+": age >= 2}
    return [
        (f"logprob_gap_staleness_{name}", chosen.to(tokens.loss_mask.dtype))
        for name, chosen in kinds.items()
    ]


def _correct_off_policy(
    settings: LossSettings, tokens: TokenBatch, pg_loss: Tensor, trainer_old: Tensor, reduce: Reduce
) -> tuple[Tensor, Tensor, Metrics]:
    """Return the loss with importance weights, the mask after rejection, and flat metrics."""
    # The built-in correction is on by default, and then a rollout without the engine's log-probs is
    # simply not corrected.
    correction = settings.correction
    if correction is None or (correction.by_default and tokens.rollout_log_probs is None):
        return pg_loss, tokens.loss_mask, {}
    rollout = require(
        tokens.rollout_log_probs, "rollout_log_probs", "--use-tis or --get-mismatch-metrics"
    )
    corrected, masks, metrics = _call_accepting(
        correction.function,
        dict(
            args=settings.args,
            pg_loss=pg_loss,
            train_log_probs=tokens.split(trainer_old),
            rollout_log_probs=tokens.split(rollout),
            loss_masks=tokens.split(tokens.loss_mask),
            total_lengths=tokens.total_lengths,
            response_lengths=tokens.response_lengths,
        ),
        optional=dict(reduce=reduce, weight_mean=tokens.mis_weight_mean),
    )
    if not correction.applies:
        return pg_loss, tokens.loss_mask, metrics
    mask = torch.cat(list(masks)).to(tokens.loss_mask.dtype) if masks else tokens.loss_mask
    # A custom function can reject tokens, but it cannot restore tokens that the mask of the sample
    # excludes.
    return corrected, mask * tokens.loss_mask, metrics


def _pg_reducer(
    settings: LossSettings,
    algorithm: Algorithm,
    tokens: TokenBatch,
    mask: Tensor,
    default: Reducer,
) -> Reducer:
    if settings.pg_reducer is None:
        return algorithm.pg_reducer(mask, default)
    given = dict(
        total_lengths=tokens.total_lengths,
        response_lengths=tokens.response_lengths,
        loss_masks=tokens.split(mask),
        calculate_per_token_loss=settings.per_token,
    )
    return _call_accepting(
        settings.pg_reducer, given, optional=dict(args=settings.args), positional=True
    )


# --- the other losses --------------------------------------------------------------------------


def _value_loss(settings: LossSettings, tokens: TokenBatch, reduce: Reduce) -> LossSum:
    values = require(tokens.values, "values", "the value loss")
    old_values = require(tokens.old_values, "the values before the step", "the value loss")
    returns = require(tokens.returns, "returns", "the value loss")
    loss, clipfrac = compute_value_loss(values, old_values, returns, settings.value_clip)
    mean = _mean(settings, tokens, tokens.loss_mask)
    total, metrics = _sum_parts({"value_loss": Part(1.0, mean(loss))})
    return LossSum(total, metrics | {"value_clipfrac": mean(clipfrac)})


def _sft_loss(settings: LossSettings, tokens: TokenBatch, reduce: Reduce) -> LossSum:
    log_probs = require(tokens.log_probs, "log_probs", "the SFT loss")
    return LossSum(_mean(settings, tokens, tokens.loss_mask)(compute_sft_loss(log_probs)), {})


def _registered_loss(settings: LossSettings, tokens: TokenBatch, reduce: Reduce) -> LossSum:
    assert settings.registered is not None
    mean = _mean(settings, tokens, tokens.loss_mask)
    return LossSum(*settings.registered.compute(tokens, mean, reduce))


class _Entries(dict[str, Any]):
    """The batch of a custom loss."""

    def __missing__(self, name: str) -> None:
        raise KeyError(f"the batch has no {name!r}; it has {', '.join(sorted(self))}")


def _custom_loss(settings: LossSettings, tokens: TokenBatch, reduce: Reduce) -> LossSum:
    """Call the function of ``--custom-loss-function-path`` as ``fn(args, batch, logits,
    sum_of_sample_mean)``.

    * ``batch``: A dict with lists per sample, which are the entries of the rank batch (``tokens``,
      ``loss_masks``, ``advantages``, ``log_probs`` (old), …, ``unconcat_tokens`` = ``tokens``,
      ``metadata`` = ``train_metadata``), and the flat ``[R]`` tensors ``targets``,
      ``current_log_probs`` (with gradient) and ``loss_mask``. With context parallelism,
      ``response_lengths`` and all entries per response token are this rank's part.
    * ``logits``: ``[R, vocab]``, the row that scores each response token, divided by the rollout
      temperature, with gradient.
    * ``sum_of_sample_mean(x)``: Reduces ``[R]`` with the reduction of the run, *before* the
      division by the rollouts or tokens of the step. That division is done here, for the loss and
      for each metric.
    """
    assert settings.custom_loss is not None, "from_args has checked it"
    logits = require(tokens.logits, "logits", "--loss-type custom_loss")
    batch = _Entries(
        tokens.sample_entries,
        response_lengths=tokens.response_lengths,
        total_lengths=tokens.total_lengths,
        targets=tokens.targets,
        current_log_probs=tokens.log_probs,
        loss_mask=tokens.loss_mask,
    )
    if "tokens" in batch:
        batch["unconcat_tokens"] = batch["tokens"]
    if "train_metadata" in batch:
        batch["metadata"] = batch["train_metadata"]
    result = settings.custom_loss(
        settings.args, batch, logits, _mean(settings, tokens, tokens.loss_mask)
    )
    pair = isinstance(result, tuple | list) and len(result) == 2
    if not pair or not isinstance(result[0], Tensor) or result[0].numel() != 1:
        raise ValueError(
            "--custom-loss-function-path must return (loss, metrics), and the loss must be one "
            "number: reduce it with sum_of_sample_mean"
        )
    loss, metrics = result
    # A metric may be a float or a tensor on the CPU. All of them are copied to the host together.
    found = {
        name: torch.as_tensor(x, device=loss.device)
        for name, x in metrics.items()
        if name != "loss"
    }
    for name, x in found.items():
        if x.numel() != 1:
            raise ValueError(
                f"--custom-loss-function-path: the metric {name!r} has the shape "
                f"{tuple(x.shape)}, but must be one number: reduce it with sum_of_sample_mean"
            )
    return LossSum(loss, found)


def _token_sum(settings: LossSettings, tokens: TokenBatch, reduce: Reduce) -> LossSum:
    """Return the plain sum of a loss over the tokens of a micro-batch."""
    assert settings.token_loss is not None, "the loss type has a token loss"
    log_probs = require(tokens.log_probs, "log_probs", "a sum over tokens")
    weights = require(tokens.advantages, "advantages", "a sum over tokens")
    sampled = log_probs.detach() if tokens.rollout_log_probs is None else tokens.rollout_log_probs
    return LossSum(settings.token_loss(log_probs, sampled, weights).sum(), {})


LOSSES: dict[str, Callable[[LossSettings, TokenBatch, Reduce], LossSum]] = {
    "policy_loss": _policy_loss,
    "value_loss": _value_loss,
    "sft_loss": _sft_loss,
    "custom_loss": _custom_loss,
    "token_sum": _token_sum,
}


def _call_accepting(
    function: Callable[..., T],
    given: Mapping[str, object],
    optional: Mapping[str, object],
    positional: bool = False,
) -> T:
    """Call a hook with its required arguments, and with those optional arguments for which it has
    parameters.
    """
    parameters = inspect.signature(function).parameters
    extra = {name: value for name, value in optional.items() if name in parameters}
    return function(*given.values(), **extra) if positional else function(**given, **extra)
