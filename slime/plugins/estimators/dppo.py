"""DPPO: a trust region of probabilities instead of ratios; and with the regulariser of Kimi K2.5.

A ratio of 2 hardly moves a token of probability 0.001, but much one of 0.4. So a token is left out
if its probability has already moved too far in the direction of its advantage, and no ratio is
clipped.

Sources: arXiv 2602.04879; for the regulariser arXiv 2602.02276 (Kimi K2.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slime.algorithms.algorithm import Row
from slime.algorithms.sequences import exp_ratio
from slime.config.flag import flag

from .k2_5 import log_ratio_penalty
from .shared import EngineTrustRegion, flags_or_defaults, notice_of_unused_clip

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class DppoFlags:
    _title = "estimators dppo, dppo_k2_5"

    dppo_delta: float = flag(0.2, above=0)
    """DPPO leaves out tokens whose divergence from the engine is larger"""
    dppo_divergence: Literal["tv", "kl"] = "tv"
    """DPPO: total variation or KL divergence of the token against all others"""
    dppo_tau: float = flag(1e-3, low=0)
    """Coefficient of the squared log-ratio in the loss of dppo_k2_5"""


def binary_divergence(log_probs: Tensor, old_log_probs: Tensor, kind: str) -> Tensor:
    """Return the divergence of the distributions (π, 1 − π) and (μ, 1 − μ): the token or any other.

    ``tv`` is |π − μ|, ``kl`` is KL(μ ‖ π) = μ log(μ/π) + (1 − μ) log((1 − μ)/(1 − π)). Both are
    lower bounds of the divergence over the whole vocabulary.

    Args:
        log_probs, old_log_probs: log π and log μ, of one shape and floating dtype, without
            gradient.

    Source: arXiv 2602.04879, the binary approximations.
    """
    import torch

    old = old_log_probs.exp()
    if kind == "tv":
        return (log_probs.exp() - old).abs()
    # A probability of 1 leaves nothing to all other tokens, whose logarithm would be infinite.
    tiny = torch.finfo(log_probs.dtype).tiny
    # 1 − π, 1 − μ
    others, old_others = (-torch.expm1(x).clamp(max=-tiny) for x in (log_probs, old_log_probs))
    return old * (old_log_probs - log_probs) + old_others * (old_others.log() - others.log())


def dppo_keep(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, delta: float, kind: str
) -> Tensor:
    """Return 0 for tokens that have moved by more than ``delta`` in the direction of their
    advantage, else 1.

    With ``tv`` a token stays if π − μ ≤ δ where A > 0, and π − μ ≥ −δ where A < 0.

    Args:
        ppo_kl: Log μ − log π per token, of any shape and floating dtype. The result has no
            gradient.
        log_probs, advantages: Log π and A, with the same shape.

    Source: arXiv 2602.04879, the mask of the objective.
    """
    difference = ppo_kl.detach()
    new = log_probs.detach()
    away = -difference * advantages > 0  # the ratio is above 1 and A > 0, or below 1 and A < 0
    far = binary_divergence(new, new + difference, kind) > delta
    return 1 - (away & far).to(log_probs.dtype)


def compute_dppo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, delta: float, kind: str
) -> tuple[Tensor, Tensor]:
    """Compute L = −keep · ρ · A per token, with ρ = exp(−ppo_kl) and :func:`dppo_keep`; and 1 −
    keep.

    All tensors have the same shape and floating dtype.

    Source: arXiv 2602.04879, the objective.
    """
    keep = dppo_keep(ppo_kl, log_probs, advantages, delta, kind)
    return -keep * exp_ratio(-ppo_kl) * advantages, 1 - keep


class Dppo(EngineTrustRegion):
    """GRPO's advantages in a trust region of probabilities around the engine's policy."""

    zero_advantage_has_no_gradient = True  # the loss is a product with the advantage
    row = Row(
        "as `grpo`",
        "−ρ·A, 0 where the token has moved by more than δ in the direction of A: abs(π − μ), or "
        "the KL of (μ, 1 − μ) and (π, 1 − π); μ of the engine",
        "needs `--use-rollout-logprobs`; `--dppo-delta`, `--dppo-divergence`",
        "arXiv 2602.04879",
    )

    def policy_loss(
        self, ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        own = flags_or_defaults(self.settings, DppoFlags)
        return compute_dppo_loss(ppo_kl, log_probs, advantages, own.dppo_delta, own.dppo_divergence)

    def notices(self) -> list[str]:
        return notice_of_unused_clip("dppo", self.settings)


class DppoK25(Dppo):
    """DPPO with the regulariser of Kimi K2.5, which pulls every token back, also one that is left
    out or has A = 0.
    """

    zero_advantage_has_no_gradient = False
    row = Row(
        "as `grpo`",
        "that of `dppo`, + τ·(log ρ)²",
        "as `dppo`; `--dppo-tau`",
        "arXiv 2602.04879 and 2602.02276; the default loss of prime-rl",
    )

    def policy_loss(
        self, ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss, dropped = super().policy_loss(ppo_kl, log_probs, advantages)
        own = flags_or_defaults(self.settings, DppoFlags)
        return loss + log_ratio_penalty(ppo_kl, own.dppo_tau), dropped
