"""Log-probability and entropy of given tokens if each rank has a part of the vocabulary.

With z the logits over the temperature, and per rank m = max z, s = Σ exp(z − m), w = Σ exp(z −
m)·z:

    M = max m,   S = Σ s·exp(m − M),   logsumexp = M + log S,   entropy = logsumexp − Σ w·exp(m − M) / S

Forward needs two small collectives per chunk of rows, and backward none. ``token_log_probs.py`` has
the formulas of the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from slime.models.autograd import Context, Gradients
from slime.models.token_log_probs import TokenScores


class VocabShard(NamedTuple):
    """This rank has the rows of the output embedding from ``start`` to ``start + len(weight)``."""

    start: int
    group: ProcessGroup


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    temperature: float = 1.0,
    *,
    chunk_size: int,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> TokenScores:
    """Return scores ``[R]``, which are equal on all ranks of the group.

    The gradient of ``hidden`` is only this rank's part: the caller must sum it over the group.

    Args:
        hidden: ``[R, H]``, equal on all ranks.
        weight: ``[V_rank, H]``, with at least one row and no padding rows.
        targets: int64 ``[R]``, token ids of the whole vocabulary.
        chunk_size: Number of rows whose logits are computed at a time. All ranks must have the same
            one, since each chunk needs collectives.
    """
    log_probs, entropy = _VocabParallelScores.apply(
        hidden,
        weight,
        targets - shard.start,
        shard.group,
        1.0 / temperature,
        chunk_size,
        entropy_grad,
    )
    if not with_entropy:
        return TokenScores(log_probs, None)
    return TokenScores(log_probs, entropy if entropy_grad else entropy.detach())


class _VocabParallelScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: ProcessGroup,
        inverse_temperature: float,
        chunk_size: int,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        log_sums = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs)
        for start in range(0, hidden.shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            z = _scaled(hidden[part], weight, inverse_temperature, dtype)
            largest = z.amax(-1)
            # All ranks subtract the same maximum, so that their sums of exponentials can be added.
            # The second collective carries three rows at once: the sum, the weighted sum for the
            # entropy, and the logit of the target.
            shared = largest.clone()
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
            e = (z - shared[:, None]).exp_()
            # A target is in the rows of exactly one rank. The others gather some valid index and
            # contribute 0.
            mine = (targets[part] >= 0) & (targets[part] < z.shape[1])
            picked = z.gather(-1, targets[part].clamp(0, z.shape[1] - 1)[:, None]).squeeze(-1)
            sums = torch.stack(
                [e.sum(-1), torch.linalg.vecdot(e, z), torch.where(mine, picked, 0.0)]
            )
            dist.all_reduce(sums, group=group)
            log_sum = shared + sums[0].log()
            log_probs[part] = sums[2] - log_sum
            log_sums[part] = log_sum
            entropy[part] = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropy)
        ctx.settings = inverse_temperature, chunk_size, entropy_grad
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        hidden, weight, targets, log_sums, entropy = ctx.saved_tensors
        inverse_temperature, chunk_size, entropy_grad = ctx.settings
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = (
            torch.zeros_like(weight, dtype=log_sums.dtype) if ctx.needs_input_grad[1] else None
        )
        for start in range(0, hidden.shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            # log_sums is that of the whole vocabulary, so each rank gets the exact probabilities of
            # its own rows, and backward needs no collective.
            log_p = _scaled(hidden[part], weight, inverse_temperature, log_sums.dtype).sub_(
                log_sums[part, None]
            )
            p = log_p.exp()
            coefficient = -grads[0][part, None]
            if entropy_grad:
                coefficient = coefficient - grads[1][part, None] * (log_p + entropy[part, None])
            dz = p.mul_(coefficient)
            mine = (targets[part] >= 0) & (targets[part] < dz.shape[1])
            index = targets[part].clamp(0, dz.shape[1] - 1)[:, None]
            dz.scatter_add_(-1, index, torch.where(mine, grads[0][part], 0.0)[:, None])
            dz = dz.mul_(inverse_temperature).to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = dz @ weight
            if d_weight is not None:
                d_weight += dz.t() @ hidden[part]
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), *(None,) * 5


def _scaled(
    hidden: Tensor, weight: Tensor, inverse_temperature: float, dtype: torch.dtype
) -> Tensor:
    return F.linear(hidden, weight).to(dtype).mul_(inverse_temperature)
