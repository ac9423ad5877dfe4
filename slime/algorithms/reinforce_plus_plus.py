"""REINFORCE++: discounted token rewards without a critic, which are whitened over the batch
afterwards.

Source: Hu et al., "REINFORCE++" (2025), and its variant with a baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .algorithm import Algorithm, Entries, Row
from .baselines import centred
from .sequences import Reduce, flatten, keep_where, put_where, scan_from_end

if TYPE_CHECKING:
    from torch import Tensor

_NEEDS_WHITENING = {
    "normalize_advantages": "whitening over the whole batch is part of the estimator"
}


def get_reinforce_plus_plus_returns(
    rewards: Sequence[float] | Tensor,
    kl: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    response_lengths: Sequence[int],
    total_lengths: Sequence[int],
    kl_coef: float,
    gamma: float,
) -> list[Tensor]:
    """Return Σ_k γ^k · (reward of the k-th unmasked token from t on) for each token t.

    The reward of a token is −kl_coef·kl_t, to which r_i is added at the last unmasked token. Masked
    tokens (for example the output of a tool) are not actions: they are not counted in the discount,
    and their returns are 0. All returns of a response without unmasked tokens (a removed sample)
    are 0.

    All tensors per sample are over whole responses, ``[response_length]``.
    """
    import torch

    token_rewards = []
    for reward, k, mask, length in zip(rewards, kl, loss_masks, response_lengths, strict=True):
        if len(k) != length:
            raise ValueError(
                f"kl has {len(k)} tokens, but the response {length}: REINFORCE++ needs whole "
                "responses"
            )
        token_reward = -kl_coef * k[mask.bool()]
        token_reward[-1:] += float(reward)
        token_rewards.append(token_reward)
    if not token_rewards:
        return []
    returns = scan_from_end(torch.nn.utils.rnn.pad_sequence(token_rewards, batch_first=True), gamma)
    return [
        put_where(mask, row[: len(own)])
        for row, own, mask in zip(returns, token_rewards, loss_masks, strict=True)
    ]


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Sequence[float] | Tensor,
    kl: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    kl_coef: float,
) -> list[Tensor]:
    """Return R_i − kl_coef·kl_t, where the mean of the group is already subtracted from R_i. The KL
    of a masked token counts as 0."""
    return [
        float(reward) - kl_coef * keep_where(mask, k)
        for reward, k, mask in zip(rewards, kl, loss_masks, strict=True)
    ]


class ReinforcePlusPlus(Algorithm):
    """REINFORCE++. There is no group baseline: whitening subtracts the mean over the batch, which
    is the baseline.
    """

    needs_group = False
    discounts = True
    uses_kl_in_reward = True
    requires = _NEEDS_WHITENING
    row = Row(
        "Σ_k γ^k (−kl_coef·kl_{t+k}), and r at the last trained token; t counts trained tokens "
        "only",
        "clipped ρ",
        "needs `--normalize-advantages`; `--gamma`, `--kl-coef`",
        "Hu et al. 2025",
    )

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        return rewards

    def advantages(self, batch: Entries) -> tuple[list[Tensor], list[Tensor]]:
        """Advantages and returns are the same."""
        returns = get_reinforce_plus_plus_returns(
            batch["rewards"],
            batch["kl"],
            batch["loss_masks"],
            batch["response_lengths"],
            batch["total_lengths"],
            self.settings.kl_coef,
            self.settings.gamma,
        )
        return returns, [x.clone() for x in returns]


class ReinforcePlusPlusBaseline(Algorithm):
    """REINFORCE++ with the mean of the group as the baseline, without discount."""

    uses_kl_in_reward = True
    requires = _NEEDS_WHITENING
    row = Row(
        "r − mean of the group − kl_coef·kl_t",
        "clipped ρ",
        "needs `--normalize-advantages`; `--kl-coef`",
        "Hu et al. 2025",
    )

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        return centred(rewards)

    def advantages(self, batch: Entries) -> tuple[list[Tensor], list[Tensor]]:
        """Advantages and returns are the same."""
        advantages = get_reinforce_plus_plus_baseline_advantages(
            batch["rewards"], batch["kl"], batch["loss_masks"], self.settings.kl_coef
        )
        return advantages, [x.clone() for x in advantages]


EPSILON = 1e-8


def normalize_advantages(
    advantages: Sequence[Tensor], loss_masks: Sequence[Tensor], reduce: Reduce
) -> list[Tensor]:
    """Compute (A − μ) · rsqrt(σ² + 1e-8), with the masked mean and the Bessel-corrected masked
    variance.

    The sums are computed in float64 and in two passes, so that the result hardly depends on how
    samples are divided among ranks. This is a collective operation: a rank without samples must
    call it too. With fewer than two unmasked tokens there is no variance, and only the mean is
    subtracted.

    Args:
        advantages, loss_masks: ``[response_length]`` per sample.
        reduce: Its ``over_data`` must count every token once.
    """
    import torch

    mask = flatten(loss_masks).double()
    x = keep_where(mask, flatten(advantages).double())
    total, count = reduce.over_data(torch.stack([(x * mask).sum(), mask.sum()])).unbind()
    # There are two passes, because one pass, with the difference of two large sums of squares,
    # would lose the variance of almost equal advantages.
    mean = total / count.clamp(min=1)
    squares = reduce.over_data(((x - mean).square() * mask).sum())
    variance = squares / (count - 1).clamp(min=1)
    scale = torch.where(count > 1, torch.rsqrt(variance + EPSILON), torch.ones_like(variance))
    return [((a.double() - mean) * scale).to(a.dtype) for a in advantages]
