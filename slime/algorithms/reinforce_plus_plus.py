"""REINFORCE++: discounted token rewards without a critic; whitening over the batch follows.

Source: Hu et al., "REINFORCE++" (2025), and its baseline variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .algorithm import Algorithm, Entries, Row
from .baselines import centred
from .sequences import keep_where, put_where, scan_from_end

if TYPE_CHECKING:
    from torch import Tensor

_NEEDS_WHITENING = {"normalize_advantages": "whitening over the whole batch is part of the estimator"}


def get_reinforce_plus_plus_returns(
    rewards: Sequence[float] | Tensor,
    kl: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    response_lengths: Sequence[int],
    total_lengths: Sequence[int],
    kl_coef: float,
    gamma: float,
) -> list[Tensor]:
    """Σ_k γ^k · (reward of the k-th unmasked token from t on), where a token's reward is −kl_coef·kl_t, plus r_i on
    the last unmasked token. Masked tokens (the output of a tool, say) are no actions: they are not discounted over,
    and their returns are 0, as are those of a response with nothing unmasked (a removed sample).

    All per-sample tensors are over whole responses, ``[response_length]``.
    """
    import torch

    token_rewards = []
    for reward, k, mask, length in zip(rewards, kl, loss_masks, response_lengths, strict=True):
        if len(k) != length:
            raise ValueError(f"kl has {len(k)} tokens, the response {length}: REINFORCE++ needs whole responses")
        token_reward = -kl_coef * k[mask.bool()]
        token_reward[-1:] += float(reward)
        token_rewards.append(token_reward)
    if not token_rewards:
        return []
    returns = scan_from_end(torch.nn.utils.rnn.pad_sequence(token_rewards, batch_first=True), gamma)
    return [put_where(mask, row[: len(own)]) for row, own, mask in zip(returns, token_rewards, loss_masks, strict=True)]


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Sequence[float] | Tensor, kl: Sequence[Tensor], loss_masks: Sequence[Tensor], kl_coef: float
) -> list[Tensor]:
    """R_i − kl_coef·kl_t, where R_i has the group's mean subtracted already. The KL of a masked token
    counts as 0."""
    return [
        float(reward) - kl_coef * keep_where(mask, k) for reward, k, mask in zip(rewards, kl, loss_masks, strict=True)
    ]


class ReinforcePlusPlus(Algorithm):
    """It trains on the reward as it is; the mean over the batch, which whitening subtracts, is the baseline."""

    needs_group = False
    uses_kl_in_reward = True
    requires = _NEEDS_WHITENING
    row = Row(
        "Σ_k γ^k (−kl_coef·kl_{t+k}), and r at the last trained token; t counts trained tokens only",
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
    """REINFORCE++ with the group's mean as a baseline, without discounts."""

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
