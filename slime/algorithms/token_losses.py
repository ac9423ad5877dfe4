"""Losses that are plain sums over tokens, for :meth:`slime.Session.forward_backward`.

π is the policy that is trained, q the one that sampled the tokens, A the advantage, ρ = π/q. A loss
of a step is the sum over all tokens of all calls before the step; nothing is divided by a number of
tokens or samples.

Sources: PPO's clip, Schulman et al. (2017), eq. 7; CISPO, MiniMax-M1 (2025), eq. 4; DRO, Richemond
et al., "Offline Regularised Reinforcement Learning for Large Language Models Alignment" (2024),
with the advantage in the place of reward minus value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .sequences import exp_ratio

if TYPE_CHECKING:
    from torch import Tensor

Options = Mapping[str, float]
TokenLoss = Callable[["Tensor", "Tensor", "Tensor", Options], "Tensor"]
"""``loss(log_probs, sampled, weights, options)``: log π, log q and A (or the weights of
cross-entropy), each ``[R]``; returns the loss per token ``[R]``."""


def cross_entropy(log_probs: Tensor, sampled: Tensor, weights: Tensor, options: Options) -> Tensor:
    """Return −w log π."""
    return -weights * log_probs


def importance_sampling(
    log_probs: Tensor, sampled: Tensor, weights: Tensor, options: Options
) -> Tensor:
    """Return −ρ A."""
    return -exp_ratio(log_probs - sampled) * weights


def ppo(log_probs: Tensor, sampled: Tensor, weights: Tensor, options: Options) -> Tensor:
    """Return −min(ρ A, clip(ρ, low, high) A)."""
    import torch

    ratio = exp_ratio(log_probs - sampled)
    return -torch.minimum(ratio * weights, _clipped(ratio, options) * weights)


def cispo(log_probs: Tensor, sampled: Tensor, weights: Tensor, options: Options) -> Tensor:
    """Return −clip(ρ, low, high) A log π, with the clipped ratio as a constant."""
    ratio = exp_ratio(log_probs - sampled).detach()
    return -_clipped(ratio, options) * weights * log_probs


def dro(log_probs: Tensor, sampled: Tensor, weights: Tensor, options: Options) -> Tensor:
    """Return −(A log π − β/2 (log π − log q)²)."""
    distance = (log_probs - sampled).square()
    return -(log_probs * weights - 0.5 * options["beta"] * distance)


def _clipped(ratio: Tensor, options: Options) -> Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
TOKEN_LOSSES: Mapping[str, tuple[TokenLoss, Options]] = {
    "cross_entropy": (cross_entropy, {}),
    "importance_sampling": (importance_sampling, {}),
    "ppo": (ppo, _CLIP),
    "cispo": (cispo, _CLIP),
    "dro": (dro, {"beta": 0.05}),
}
"""Each loss by its name, with its options and their defaults."""
