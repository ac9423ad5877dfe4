"""Attention with a mask, attention sinks and soft-capped scores, from plain matrix products.

SDPA has neither sinks nor soft caps. The trainer and the embedded engine use this function for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ScoreChanges:
    """What a model does to attention scores besides scaling and masking them.

    Attributes:
        sinks: ``[H]`` (or ``[H, L_q]``, if the queries of a head have different ones). Each softmax has one more key
            with this score, whose value is 0 (gpt-oss, https://arxiv.org/abs/2508.10925).
        softcap: Scores are ``softcap · tanh(score / softcap)`` (Gemma 2, https://arxiv.org/abs/2408.00118).
    """

    sinks: Tensor | None = None
    softcap: float | None = None

    @property
    def none(self) -> bool:
        return self.sinks is None and not self.softcap


UNCHANGED = ScoreChanges()


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, changes: ScoreChanges = UNCHANGED
) -> Tensor:
    """Compute attention.

    Args:
        q: ``[n, H, L_q, d]``; k: ``[n, H_kv, L_k, d]``; v: ``[n, H_kv, L_k, d_v]``; H is a multiple of H_kv.
        mask: Broadcasts to ``[n, 1, L_q, L_k]``: bool, True where a query may attend, or float, added to the scores.
        scale: The factor of the scores; None for ``d**-0.5``.

    Returns:
        ``[n, H, L_q, d_v]``.
    """
    if changes.none:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = (q @ k.transpose(2, 3)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if changes.softcap:
        scores = torch.tanh(scores / changes.softcap) * changes.softcap
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if changes.sinks is not None:
        sinks = changes.sinks.to(scores.dtype).reshape(1, q.shape[1], -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v
