"""Masked importance sampling: weights and rejection at token, sequence or geometric-mean level.

It is a ``--custom-tis-function-path`` hook (``slime.algorithms.mis.compute_mis_weights``). Its
settings are attributes of ``args``, which ``--custom-config-path`` sets. All of them are optional:

==================== =========================================================================
use_tis              multiply the loss by importance weights
tis_level            ``token`` (default), ``sequence`` or ``geometric``
tis_mode             ``truncate`` (default): clamp the weight to [0, upper]; ``clip``: to [lower, upper];
                     ``mask``: keep the weight, reject tokens outside [lower, upper]
tis_upper_bound      default ``--tis-clip`` (2.0)
tis_lower_bound      default 1 / tis_upper_bound
tis_batch_normalize  divide by the mean weight over the tokens of the rollout that mask and tis_mode keep
use_rs               reject tokens whose ratio at rs_level is outside [rs_lower_bound, rs_upper_bound]
rs_level             default tis_level
rs_lower_bound, rs_upper_bound   default: the tis bounds
rs_veto_threshold    reject a whole sequence if one of its unmasked tokens has a ratio below this
==================== =========================================================================

With d_t = log π_train − log π_rollout, the log-ratio is d_t (token), Σ m d (sequence) or the masked
mean of d (geometric). The ratio is the exponential of the log-ratio, clamped to ±20. A rejected
token is removed from the numerator of the loss, but the denominator is the sum of the mask before
the rejection.

Sources: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the
Training-Inference Mismatch" (2025); Zheng et al., GSPO (2025), for the length-normalized ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .algorithm import custom_setting
from .off_policy import TisResult
from .sequences import (
    IDENTITY,
    Reduce,
    exp_ratio,
    flatten,
    keep_where,
    sequence_means,
    sequence_sums,
    spread,
)

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]


@dataclass(frozen=True)
class MisConfig:
    """The settings of the table above, checked and with defaults."""

    use_tis: bool
    tis_level: Level
    tis_mode: Mode
    tis_lower: float
    tis_upper: float
    batch_normalize: bool
    use_rs: bool
    rs_level: Level
    rs_lower: float
    rs_upper: float
    veto: float | None

    @classmethod
    def from_args(cls, args: object) -> MisConfig:
        """Read the settings. Raises ValueError if a level or mode is unknown, or bounds are out of
        range or order.
        """

        def setting(name: str, default: object) -> Any:
            return custom_setting(args, name, default)

        # The bounds of the rejection default to those of the weights, and the lower bound to the
        # inverse of the upper one.
        upper = float(setting("tis_upper_bound", setting("tis_clip", 2.0)))
        if upper <= 0:
            raise ValueError(
                f"tis_upper_bound is {upper:g}, but must be above 0 (--custom-config-path or "
                "--tis-clip)"
            )
        lower = float(setting("tis_lower_bound", 1 / upper))
        level = setting("tis_level", "token")
        veto = setting("rs_veto_threshold", None)
        config = cls(
            use_tis=bool(setting("use_tis", False)),
            tis_level=level,
            tis_mode=setting("tis_mode", "truncate"),
            tis_lower=lower,
            tis_upper=upper,
            batch_normalize=bool(setting("tis_batch_normalize", False)),
            use_rs=bool(setting("use_rs", False)),
            rs_level=setting("rs_level", level),
            rs_lower=float(setting("rs_lower_bound", lower)),
            rs_upper=float(setting("rs_upper_bound", upper)),
            veto=None if veto is None else float(veto),  # YAML reads 1e-4 as text
        )
        config._check()
        return config

    def _check(self) -> None:
        for name, value, known in (
            ("tis_level", self.tis_level, get_args(Level)),
            ("rs_level", self.rs_level, get_args(Level)),
            ("tis_mode", self.tis_mode, get_args(Mode)),
        ):
            if value not in known:
                raise ValueError(
                    f"{name} is {value!r}, but must be one of {', '.join(known)} "
                    "(--custom-config-path)"
                )
        for name, low, high in (
            ("tis", self.tis_lower, self.tis_upper),
            ("rs", self.rs_lower, self.rs_upper),
        ):
            if not 0 <= low <= high:
                raise ValueError(
                    f"{name}_lower_bound {low} must be >= 0 and <= {name}_upper_bound {high}"
                )
        if self.veto is not None and self.veto <= 0:
            raise ValueError(f"rs_veto_threshold is {self.veto}, but must be above 0")


def ratio_at(
    level: Level, d: Tensor, mask: Tensor, lengths: Sequence[int], reduce: Reduce = IDENTITY
) -> Tensor:
    """Return the importance ratio of every token at a level, ``[R]``. ``d`` must be 0 for masked
    tokens.
    """
    if level == "token":
        return exp_ratio(d)
    if level == "sequence":
        return exp_ratio(spread(reduce.over_sequence(sequence_sums(d, lengths)), lengths))
    return exp_ratio(spread(sequence_means(d, mask, lengths, reduce), lengths))


def importance_weights(
    config: MisConfig, d: Tensor, mask: Tensor, lengths: Sequence[int], reduce: Reduce = IDENTITY
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight before batch normalization, mask after ``tis_mode`` (floats), and ratio, all
    ``[R]``.
    """
    ratio = ratio_at(config.tis_level, d, mask, lengths, reduce)
    if config.tis_mode == "truncate":
        return ratio.clamp(max=config.tis_upper), mask, ratio
    if config.tis_mode == "clip":
        return ratio.clamp(config.tis_lower, config.tis_upper), mask, ratio
    return ratio, mask * _inside(ratio, config.tis_lower, config.tis_upper), ratio


def mean_weight(
    config: MisConfig, d: Tensor, mask: Tensor, lengths: Sequence[int], reduce: Reduce
) -> float:
    """Return the mean weight for ``tis_batch_normalize``, over tokens of all data-parallel ranks.

    ``d`` is log π_train − log π_rollout, ``[R]`` like the mask, and ``lengths`` are those of the
    sequences in it.

    Only tokens that the mask and ``tis_mode`` keep are counted. The mean is computed once per
    rollout, before training, so that the loss does not depend on the micro-batches. It is 1.0 if
    the mean is 0 or all tokens are masked.
    """
    weight, kept, _ = importance_weights(config, d, mask, lengths)
    totals = torch.stack([(weight * kept).sum().double(), kept.sum().double()])
    total, count = reduce.over_data(totals).tolist()
    return total / count if count > 0 and total > 0 else 1.0


def compute_mis_weights(
    *,
    args: object,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    reduce: Reduce = IDENTITY,
    weight_mean: float | None = None,
    **_: object,
) -> TisResult:
    """Multiply the loss by importance weights and reject tokens.

    Args:
        weight_mean: The mean weight of the whole rollout for ``tis_batch_normalize``. By default it
            is the mean over the given tokens.

    Returns:
        The weighted loss ``[R]``, the masks after rejection (one per sample), and flat ``mis_*``
        metrics.
    """
    config = MisConfig.from_args(args)
    lengths = [len(mask) for mask in loss_masks]
    rollout = flatten(rollout_log_probs).detach()
    mask = flatten(loss_masks).to(rollout.dtype)
    train = keep_where(mask, flatten(train_log_probs).detach())
    rollout = keep_where(mask, rollout)
    d = train - rollout
    # Each rule only removes tokens from this mask. The divisor of the mean uses the original mask,
    # so a rejected token counts as a token with a loss of 0.
    kept = mask
    metrics = _diagnostics(train, rollout, mask, lengths, reduce)
    # Weights.
    if config.use_tis:
        weight, kept, ratio = importance_weights(config, d, mask, lengths, reduce)
        metrics |= {
            "mis_ratio": ratio,
            "mis_tis_changed_frac": ((weight != ratio) | (kept != mask)).to(d.dtype),
        }
        if config.batch_normalize:
            if weight_mean is None:
                weight_mean = mean_weight(config, d, mask, lengths, IDENTITY)
            weight = weight / weight_mean
        metrics["mis_weight"] = weight
        pg_loss = pg_loss * weight
    # Rejection of tokens by their ratio, and of whole sequences by their worst token.
    if config.use_rs:
        ratio = ratio_at(config.rs_level, d, mask, lengths, reduce)
        inside = _inside(ratio, config.rs_lower, config.rs_upper)
        metrics["mis_rs_rejected_frac"] = 1 - inside
        kept = kept * inside
    if config.veto is not None:
        fatal = (d < math.log(config.veto)).to(d.dtype)
        count = spread(reduce.over_sequence(sequence_sums(fatal * mask, lengths)), lengths)
        metrics["mis_veto_frac"] = (count > 0).to(d.dtype)
        kept = kept * (count == 0)
    metrics["mis_rejected_frac"] = mask - kept
    pairs = zip(kept.split(lengths), loss_masks, strict=True)
    return pg_loss, [new.to(old.dtype) for new, old in pairs], metrics


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return ((ratio >= low) & (ratio <= high)).to(ratio.dtype)


def _diagnostics(
    train: Tensor, rollout: Tensor, mask: Tensor, lengths: Sequence[int], reduce: Reduce
) -> dict[str, Tensor]:
    """Return metrics of the difference between trainer and engine.

    These are KL(rollout ‖ trainer) and chi²(trainer ‖ rollout), estimated on the engine's samples,
    and perplexities per sequence.
    """
    d = train - rollout
    token, sequence = (ratio_at(level, d, mask, lengths, reduce) for level in ("token", "sequence"))
    train_nll, rollout_nll = (
        -spread(sequence_means(x, mask, lengths, reduce), lengths) for x in (train, rollout)
    )
    return {
        "mis_kl": -d,
        "mis_k3_kl": torch.expm1(d.clamp(max=20.0)) - d,
        "mis_train_ppl": train_nll.exp(),
        "mis_rollout_ppl": rollout_nll.exp(),
        "mis_log_ppl_diff": train_nll - rollout_nll,
        "mis_chi2_token": token.square() - 1,
        "mis_chi2_seq": sequence.square() - 1,
    }
