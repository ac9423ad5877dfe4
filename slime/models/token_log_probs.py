"""Log-probability and entropy of given tokens from hidden states, one chunk of logits at a time.

With z = logits / temperature, p = softmax(z) and target t:

    log_prob = z_t − logsumexp(z)              d log_prob / dz_j = 1[j = t] − p_j
    entropy  = logsumexp(z) − Σ_j p_j z_j      d entropy / dz_j  = −p_j (z_j − Σ_k p_k z_k)

Softmax and sums are float32 whatever the model's dtype. Forward keeps the logits of no chunk but the
last; backward recomputes the others. So at most one chunk of logits is alive at any time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime.models.cpu_linear import matmul_nt

CHUNK_BYTES = 256 * 1024 * 1024


class TokenScores(NamedTuple):
    """Per token, float32 ``[R]``; the entropy is None when it was not asked for."""

    log_probs: Tensor
    entropy: Tensor | None


def default_chunk_size(vocab_size: int) -> int:
    """Rows per chunk so that its float32 logits take about 256 MiB."""
    return max(CHUNK_BYTES // (4 * vocab_size), 64)


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    bias: Tensor | None = None,
    chunk_size: int = -1,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> TokenScores:
    """Score ``targets`` under ``softmax((hidden @ weight.T + bias) / temperature)``.

    Args:
        hidden: ``[R, H]``, only the rows that score a token.
        weight: ``[V, H]``, the output embedding; bias: ``[V]`` or None.
        targets: int64 ``[R]``.
        chunk_size: rows of logits at a time; -1 for about 256 MiB of them.
        with_entropy: also the entropy; with ``entropy_grad`` it carries a gradient.
    """
    size = chunk_size if chunk_size > 0 else default_chunk_size(weight.shape[0])
    log_probs, entropy = _TokenScores.apply(
        hidden, weight, bias, targets, 1.0 / temperature, size, with_entropy, entropy_grad
    )
    if not with_entropy:
        return TokenScores(log_probs, None)
    return TokenScores(log_probs, entropy if entropy_grad else entropy.detach())


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse_temperature: float,
        chunk_size: int,
        with_entropy: bool,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = hidden.shape[0]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.empty(rows, dtype=dtype, device=hidden.device)
        log_sums, entropy = torch.empty_like(log_probs), torch.empty_like(log_probs)
        kept: Tensor | None = None
        keep = any(ctx.needs_input_grad[:3])
        for start in range(0, rows, chunk_size):
            part = slice(start, start + chunk_size)
            logits = _scaled_logits(hidden[part], weight, bias, inverse_temperature, dtype)
            log_sums[part] = log_sum = logits.logsumexp(-1)
            log_probs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - log_sum
            if with_entropy:
                entropy[part] = _entropy(logits, log_sum)
            if keep and part.stop >= rows:
                kept = logits
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropy, kept)
        ctx.settings = inverse_temperature, chunk_size, entropy_grad
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums, entropy, kept = ctx.saved_tensors
        inverse_temperature, chunk_size, entropy_grad = ctx.settings
        grad_log_probs, grad_entropy = grads
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        dhidden = torch.empty_like(hidden) if need_hidden else None
        # bf16 chunks are summed in float32; a single product already is.
        dweight: Tensor | None = None
        dbias = torch.zeros_like(bias, dtype=log_sums.dtype) if need_bias else None
        last = (max(hidden.shape[0] - 1, 0) // chunk_size) * chunk_size
        for start in range(last, -1, -chunk_size):
            part = slice(start, start + chunk_size)
            z = kept if start == last else None
            if z is None:
                z = _scaled_logits(hidden[part], weight, bias, inverse_temperature, log_sums.dtype)
            kept = None
            coefficient = grad_entropy[part, None] if entropy_grad else None
            dz = _logit_gradient(
                z, targets[part, None], log_sums[part, None], grad_log_probs[part, None], coefficient, entropy[part, None]
            )
            dz = dz.mul_(inverse_temperature).to(hidden.dtype)
            del z
            if dhidden is not None:
                dhidden[part] = matmul_nt(dz, weight.t())
            if need_weight:
                product = matmul_nt(dz.t(), hidden[part].t())
                dweight = product if dweight is None else _accumulate(dweight, product)
            if dbias is not None:
                dbias += dz.sum(0)
        dweight = dweight.to(weight.dtype) if dweight is not None else None
        return dhidden, dweight, dbias.to(bias.dtype) if dbias is not None else None, *(None,) * 5


def _scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, inverse_temperature: float, dtype: torch.dtype
) -> Tensor:
    logits = matmul_nt(hidden, weight)
    if bias is not None:
        logits += bias
    logits = logits.to(dtype)
    return logits if inverse_temperature == 1.0 else logits.mul_(inverse_temperature)


def _entropy(z: Tensor, log_sum: Tensor) -> Tensor:
    log_p = z - log_sum[:, None]
    return -(log_p.exp() * log_p).sum(-1)


def _logit_gradient(
    z: Tensor, targets: Tensor, log_sums: Tensor, grad: Tensor, grad_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """Gradient with respect to z, in place of z. Column vectors ``[r, 1]`` but for z."""
    log_p = z.sub_(log_sums)
    if grad_entropy is None:
        dz = log_p.exp_().mul_(-grad)
    else:
        p = log_p.exp()
        dz = log_p.add_(entropy).mul_(-grad_entropy).sub_(grad).mul_(p)
    return dz.scatter_add_(-1, targets, grad)


def _accumulate(total: Tensor, product: Tensor) -> Tensor:
    return total.add_(product) if total.dtype == torch.float32 else total.float().add_(product)
