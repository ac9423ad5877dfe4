"""PPO: generalised advantage estimation from a critic's values.

Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .sequences import keep_where, scan_from_end


def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: Sequence[Tensor],
    rewards_list: Sequence[Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """δ_t = r_t + γ V_{t+1} − V_t with V = 0 beyond the end; A_t = δ_t + γ λ A_{t+1}; returns = A + V.

    Args:
        values_list, rewards_list: per sample ``[response_length]``, over whole responses.
        chunked: the parallel scan; False is the serial recurrence, for comparison.

    Returns:
        advantages and returns, per sample ``[response_length]``, without gradient.
    """
    lengths = [len(values) for values in values_list]
    if lengths != list(response_lengths):
        raise ValueError(
            f"values have lengths {lengths}, responses {list(response_lengths)}: GAE needs whole responses"
        )
    if not lengths:
        return [], []
    values = torch.nn.utils.rnn.pad_sequence([v.detach() for v in values_list], batch_first=True)
    rewards = torch.nn.utils.rnn.pad_sequence(list(rewards_list), batch_first=True).to(values.dtype)
    following = torch.nn.functional.pad(values, (0, 1))[:, 1:]
    delta = rewards + gamma * following - values
    scan = scan_from_end if chunked else _serial
    advantages = scan(delta, gamma * lambd)
    rows = list(zip(advantages, values, lengths, strict=True))
    return [a[:n] for a, _, n in rows], [(a + v)[:n] for a, v, n in rows]


def _serial(x: Tensor, factor: float) -> Tensor:
    out = torch.zeros_like(x)
    running = x.new_zeros(len(x))
    for t in range(x.shape[1] - 1, -1, -1):
        running = x[:, t] + factor * running
        out[:, t] = running
    return out


def last_unmasked(mask: Tensor) -> int | None:
    """Position of the last 1, or None."""
    on = torch.nonzero(mask)
    return int(on[-1]) if len(on) else None


def compute(args: Any, batch: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Token reward −kl_coef·kl_t, plus the response's reward on its last trained token.

    The response ends at its last unmasked token: masked tokens after it (the output of a last tool
    call, say) are no actions and the critic is not trained there, so they carry no reward and no
    value. Masked tokens in between pass advantages through. Without masked tokens at the end this is
    plain GAE over the response.

    Raises:
        ValueError: the batch has no ``values``.
    """
    if batch.get("values") is None:
        raise ValueError("--advantage-estimator ppo needs the critic's values in the batch, and there are none")
    ends = [last_unmasked(mask) for mask in batch["loss_masks"]]
    lengths = [0 if end is None else end + 1 for end in ends]
    values = [v[:n] for v, n in zip(batch["values"], lengths, strict=True)]
    rewards = []
    for reward, kl, mask, n in zip(batch["rewards"], batch["kl"], batch["loss_masks"], lengths, strict=True):
        token_rewards = -args.kl_coef * keep_where(mask[:n], kl[:n])
        if n:
            token_rewards[-1] += float(reward)
        rewards.append(token_rewards)
    total_lengths = [
        total - (response - n)
        for total, response, n in zip(batch["total_lengths"], batch["response_lengths"], lengths, strict=True)
    ]
    advantages, returns = get_advantages_and_returns_batch(
        total_lengths, lengths, values, rewards, args.gamma, args.lambd
    )
    return _pad_like(advantages, batch["kl"]), _pad_like(returns, batch["kl"])


def _pad_like(parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.nn.functional.pad(x, (0, len(y) - len(x))) for x, y in zip(parts, like, strict=True)]
