"""The losses of the plug-in for one token, on float64 scalars, straight from the papers'
formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from slime.config.args import Args

OfToken = Callable[[Args, Tensor, Tensor, float], tuple[Tensor, float]]
"""Of the flags, log old − log new (of the token or its sequence), log new and the advantage: the
loss, and whether it counts as clipped."""


def sapo(a: Args, ppo_kl: Tensor, log_prob: Tensor, advantage: float) -> tuple[Tensor, float]:
    tau = a.sapo_tau_positive if advantage > 0 else a.sapo_tau_negative
    gate = 1 / (1 + torch.exp(-tau * (torch.exp(-ppo_kl) - 1)))
    return -4 * gate / tau * advantage, 0.0


def vespo(a: Args, ppo_kl: Tensor, log_prob: Tensor, advantage: float) -> tuple[Tensor, float]:
    k, decay = (
        (a.vespo_k_positive, a.vespo_lambda_positive)
        if advantage > 0
        else (a.vespo_k_negative, a.vespo_lambda_negative)
    )
    w = math.exp(-float(ppo_kl.detach()))
    return -(w**k) * math.exp(decay * (1 - w)) * advantage * log_prob, 0.0


def kl_cov(a: Args, ppo_kl: Tensor, log_prob: Tensor, advantage: float) -> tuple[Tensor, float]:
    """Of a token that is not among the chosen ones."""
    return -torch.exp(-ppo_kl) * advantage, 0.0


def k2_5(a: Args, ppo_kl: Tensor, log_prob: Tensor, advantage: float) -> tuple[Tensor, float]:
    high = a.eps_clip if a.eps_clip_high is None else a.eps_clip_high
    ratio = torch.exp(-ppo_kl)
    inside = 1 - a.eps_clip <= float(ratio.detach()) <= 1 + high
    bounded = (
        ratio
        if inside
        else torch.tensor(1 + high if ratio > 1 else 1 - a.eps_clip, dtype=torch.float64)
    )
    return -bounded * advantage + a.k2_5_tau * ppo_kl**2, float(not inside)


def dppo(a: Args, ppo_kl: Tensor, log_prob: Tensor, advantage: float) -> tuple[Tensor, float]:
    new, old = math.exp(float(log_prob.detach())), math.exp(float((log_prob + ppo_kl).detach()))
    assert a.dppo_divergence == "tv"
    out = new - old > a.dppo_delta if advantage > 0 else new - old < -a.dppo_delta
    return (ppo_kl * 0 if out else -torch.exp(-ppo_kl) * advantage), float(out)


def dppo_k2_5(a: Args, ppo_kl: Tensor, log_prob: Tensor, advantage: float) -> tuple[Tensor, float]:
    loss, out = dppo(a, ppo_kl, log_prob, advantage)
    return loss + a.dppo_tau * ppo_kl**2, out


OfSequence = Callable[[Args, list[Tensor], list[float], int], tuple[Tensor, float]]
"""Of the flags, log old − log new and the advantage of each trained token of a response, and the place
of the token: as ``OfToken``."""


def gmpo(
    a: Args, ppo_kl: list[Tensor], advantages: list[float], place: int
) -> tuple[Tensor, float]:
    total = torch.zeros((), dtype=torch.float64)
    clipped = []
    for kl, advantage in zip(ppo_kl, advantages, strict=True):
        sign = math.copysign(1.0, advantage)
        clipped.append(sign * float(-kl.detach()) > a.gmpo_clip)
        total = total + (sign * a.gmpo_clip if clipped[-1] else -kl)
    return -torch.exp(total / len(ppo_kl)) * advantages[place], float(clipped[place])


def vaco(
    a: Args, ppo_kl: list[Tensor], advantages: list[float], place: int
) -> tuple[Tensor, float]:
    moved = [math.exp(-float(kl.detach())) - 1 for kl in ppo_kl]
    far = sum(map(abs, moved)) / 2 / len(moved) > a.vaco_delta
    out = far and advantages[place] * moved[place] >= 0
    own = ppo_kl[place]
    return (own * 0 if out else -torch.exp(-own) * advantages[place]), float(out)


OF_SEQUENCES: dict[str, OfSequence] = {"gmpo": gmpo, "vaco": vaco}

LOSSES: dict[str, OfToken] = {
    "sapo": sapo,
    "vespo": vespo,
    "kl_cov": kl_cov,
    "k2_5": k2_5,
    "dppo": dppo,
    "dppo_k2_5": dppo_k2_5,
}
