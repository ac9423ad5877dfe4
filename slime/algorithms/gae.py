"""PPO: generalized advantage estimation (GAE) from a critic's values.

Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
Estimation" (2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .algorithm import Algorithm, Entries, Row
from .sequences import put_where, scan_from_end

if TYPE_CHECKING:
    from torch import Tensor


def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: Sequence[Tensor],
    rewards_list: Sequence[Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute δ_t = r_t + γ V_{t+1} − V_t with V = 0 after the end, A_t = δ_t + γ λ A_{t+1}, and
    returns = A + V.

    Args:
        values_list, rewards_list: ``[response_length]`` per sample, over whole responses.
        chunked: Use the parallel scan. False uses the serial recurrence, for comparison.

    Returns:
        Advantages and returns, ``[response_length]`` per sample, without gradient.
    """
    import torch

    lengths = [len(values) for values in values_list]
    if lengths != list(response_lengths):
        raise ValueError(
            f"values have lengths {lengths}, but responses {list(response_lengths)}: GAE needs "
            "whole responses"
        )
    if not lengths:
        return [], []
    values = torch.nn.utils.rnn.pad_sequence([v.detach() for v in values_list], batch_first=True)
    rewards = torch.nn.utils.rnn.pad_sequence(list(rewards_list), batch_first=True).to(values.dtype)
    # The padding of values and rewards is 0, so the value after the last token of a shorter
    # response is 0.
    following = torch.nn.functional.pad(values, (0, 1))[:, 1:]
    delta = rewards + gamma * following - values
    scan = scan_from_end if chunked else _serial
    advantages = scan(delta, gamma * lambd)
    rows = list(zip(advantages, values, lengths, strict=True))
    return [a[:n] for a, _, n in rows], [(a + v)[:n] for a, v, n in rows]


def _serial(x: Tensor, factor: float) -> Tensor:
    out = x.new_zeros(x.shape)
    running = x.new_zeros(len(x))
    for t in range(x.shape[1] - 1, -1, -1):
        running = x[:, t] + factor * running
        out[:, t] = running
    return out


class Ppo(Algorithm):
    """PPO, with advantages from GAE. Rewards are used without a group baseline, because the critic
    is the baseline.
    """

    needs_critic = True
    needs_group = False
    needs_old_log_probs = True
    discounts = True
    uses_kl_in_reward = True
    row = Row(
        "GAE: δ_t = r_t + γV_{t+1} − V_t, A_t = δ_t + γλA_{t+1}; r_t = −kl_coef·kl_t, and r at "
        "the last trained token; t counts trained tokens only",
        "clipped ρ; critic: max((V−R)², (V_old + clip(V−V_old) − R)²) with R_t = A_t + V_old,t, "
        "of the same r_t",
        "`--gamma`, `--lambd`, `--critic-lr`, `--value-clip`, `--num-critic-only-steps`",
        "Schulman et al. 2016, 2017",
    )

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        return rewards

    def advantages(self, batch: Entries) -> tuple[list[Tensor], list[Tensor]]:
        """Compute GAE from token rewards −kl_coef·kl_t, to which the reward is added at the last
        trained token.

        Raises:
            ValueError: The batch has no ``values``.
        """
        if batch.get("values") is None:
            raise ValueError(
                "--advantage-estimator ppo needs the critic's values, but the batch has none"
            )
        # Only trained tokens are time steps. The output of a tool between two turns is not an
        # action, and the critic is not trained on it, so neither its values nor its length may have
        # an effect: the token after t is the next trained token. Masked tokens get advantages and
        # returns of 0.
        masks = [mask.bool() for mask in batch["loss_masks"]]
        values = [v[mask] for v, mask in zip(batch["values"], masks, strict=True)]
        rewards = []
        for reward, kl, mask in zip(batch["rewards"], batch["kl"], masks, strict=True):
            token_rewards = -self.settings.kl_coef * kl[mask]
            token_rewards[-1:] += float(reward)
            rewards.append(token_rewards)
        lengths = [len(v) for v in values]
        prompts = [
            total - n
            for total, n in zip(batch["total_lengths"], batch["response_lengths"], strict=True)
        ]
        total_lengths = [prompt + n for prompt, n in zip(prompts, lengths, strict=True)]
        # The results have one entry per trained token, and are put back among the masked ones.
        advantages, returns = get_advantages_and_returns_batch(
            total_lengths, lengths, values, rewards, self.settings.gamma, self.settings.lambd
        )
        return _put_back(advantages, masks), _put_back(returns, masks)


def _put_back(parts: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    return [put_where(mask, x) for x, mask in zip(parts, masks, strict=True)]
