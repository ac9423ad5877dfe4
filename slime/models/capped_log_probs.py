"""Log-probs of models that soft-cap their logits, ``cap · tanh(logit / cap)`` (Gemma 2 and 4)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.models.cpu_linear import linear
from slime.models.token_log_probs import TokenScores, default_chunk_size


def capped_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, cap: float) -> Tensor:
    """Return the logits ``[R, V]`` in float32 of hidden states ``[R, H]``."""
    return torch.tanh(linear(hidden, weight, bias).float() / cap) * cap


def capped_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    cap: float,
    bias: Tensor | None = None,
    chunk_size: int = -1,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> TokenScores:
    """Score ``targets`` under the capped logits; otherwise as :func:`slime.models.token_log_probs.token_log_probs`,
    with tensors of the same shapes.

    The logits of a chunk of rows are recomputed in backward, so that only those of one chunk are in memory.
    """
    size = chunk_size if chunk_size > 0 else default_chunk_size(weight.shape[0])

    def scores(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        log_p = (capped_logits(rows, weight, bias, cap) / temperature).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else log_p.new_zeros(len(rows))
        return log_p.gather(-1, wanted[:, None]).squeeze(-1), entropy

    parts = [
        checkpoint(scores, rows, wanted, use_reentrant=False)
        for rows, wanted in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    log_probs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    if not with_entropy:
        return TokenScores(log_probs, None)
    return TokenScores(log_probs, entropy if entropy_grad else entropy.detach())
