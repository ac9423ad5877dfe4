"""The functions of a dense model of which a row's result depends on this row alone.

On a GPU, forward passes run the kernels of :mod:`slime.plugins.true_on_policy.triton_kernels`.
Gradients need not be equal to anything, and come from torch's own kernels. On the CPU, both are
plain torch in float64: sums of products of bfloat16 numbers are exact there but for rare extremes,
whatever their order is, so that results rounded to bfloat16 are equal as well.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.models.autograd import Context, Gradients
from slime.models.flash_attention import can_attend
from slime.models.fused import fused_on_cuda


def kernels_for(x: Tensor) -> ModuleType | None:
    """Return the module with the kernels for a tensor; None on the CPU."""
    if not x.is_cuda:
        return None
    from slime.plugins.true_on_policy import triton_kernels

    return triton_kernels


class _Computed(torch.autograd.Function):
    """A kernel, with a function for its gradients."""

    @staticmethod
    def forward(
        ctx: Context,
        run: Callable[..., tuple[Tensor, ...]],
        gradients: Callable[..., Gradients],
        *inputs: Tensor,
    ) -> Tensor:
        with torch.cuda.device_of(inputs[0]):  # Triton takes the thread's own device otherwise
            out, *kept = run(*inputs)
        ctx.save_for_backward(*kept)
        ctx.settings = (gradients,)
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        return None, None, *ctx.settings[0](grads[0].contiguous(), *ctx.saved_tensors)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: ``[..., k]`` and ``[n, k]`` to ``[..., n]``."""
    kernels = kernels_for(x)
    if kernels is None:
        wide = x.double() @ weight.double().t() + (0.0 if bias is None else bias)
        return wide.to(x.dtype)

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out: Tensor = _Computed.apply(
        lambda x, w, bias: (kernels.matmul(x, w, bias), x, w),
        lambda grad, x, w: (grad @ w, grad.t() @ x, None if bias is None else grad.sum(0)),
        *(rows, weight, bias),
    )
    return out.view(*x.shape[:-1], -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight * x / rms(x)`` over the last dimension of ``x``."""
    kernels = kernels_for(x)
    if kernels is None:
        return weight * F.rms_norm(x.double(), weight.shape, eps=eps).to(x.dtype)

    out: Tensor = _Computed.apply(
        lambda x, w: (kernels.rms_norm(x, w, eps), x, w),
        lambda grad, x, w: _norm_gradients(grad, x, weight=w, eps=eps),
        *(x.reshape(-1, x.shape[-1]).contiguous(), weight),
    )
    return out.view(x.shape)


@fused_on_cuda
def _norm_gradients(
    grad: Tensor, rows: Tensor, *, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    wide = rows.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = wide * scale
    of_normed = grad.float() * weight.float()
    of_rows = scale * (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True))
    return of_rows.to(rows.dtype), (grad.float() * normed).sum(0).to(weight.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotary embeddings of ``[T, H, d]``; cos and sin are ``[T, d]``."""
    kernels = kernels_for(x)
    if kernels is None:
        first, second = x.double().chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return (x.double() * cos.double()[:, None] + turned * sin.double()[:, None]).to(x.dtype)

    out: Tensor = _Computed.apply(
        lambda x: (kernels.rotate(x, cos, sin, 1),),
        lambda grad: (kernels.rotate(grad, cos, sin, -1),),
        x.contiguous(),
    )
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of rows ``[..., width]``."""
    kernels = kernels_for(gate)
    if kernels is None:
        return (F.silu(gate.double()) * up.double()).to(gate.dtype)

    out: Tensor = _Computed.apply(
        lambda gate, up: (kernels.swiglu(gate, up), gate, up),
        _swiglu_gradients,
        *(gate.flatten(0, -2).contiguous(), up.flatten(0, -2).contiguous()),
    )
    return out.view(gate.shape)


@fused_on_cuda
def _swiglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    g = gate.float()
    sigmoid = torch.sigmoid(g)
    of_gate = grad.float() * up.float() * sigmoid * (1 + g * (1 - sigmoid))
    return of_gate.to(gate.dtype), (grad.float() * g * sigmoid).to(up.dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor,
    longest: tuple[int, int],
    scale: float,
    starts: tuple[Tensor, Tensor] | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Attend causally over segments; see :func:`slime.plugins.true_on_policy.triton_kernels.attend`
    for the other arguments.

    Args:
        longest: The largest number of queries, and of keys.
        starts: int32 ``[segments + 1]``, the first query and the first key of each segment. On a
            GPU there is no gradient without them.
    """
    kernels = kernels_for(q)
    if kernels is None:
        return _attend_in_float64(q, k, v, spans, scale, table)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, lse = kernels.attend(q, k, v, spans, longest[0], scale, table)
        return out, q, k, v, out, lse

    def gradients(*rows: Tensor) -> Gradients:
        assert starts is not None
        if can_attend(*rows[1:4]):
            same = torch.are_deterministic_algorithms_enabled()
            sizes = *starts, *longest, scale, -1, None, same
            return tuple(torch.ops.slime.flash_attention_4_backward(*rows, *sizes))
        seed = torch.empty(2, dtype=torch.uint64, device=rows[0].device)  # of no dropout
        more = *starts, *longest, 0.0, True, seed, seed[:0]
        found = torch.ops.aten._flash_attention_backward(*rows, *more, scale=scale)
        return tuple(found[:3])

    out: Tensor = _Computed.apply(run, gradients, q.contiguous(), k.contiguous(), v.contiguous())
    return out


def _attend_in_float64(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, scale: float, table: Tensor | None
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for first, queries, first_key, keys in spans.t().tolist():
        mine = q[first : first + queries].double().transpose(0, 1)
        seen: slice | Tensor = slice(first_key, first_key + keys)
        if table is not None:
            seen = table[seen].long()
        k_seen, v_seen = (
            x[seen].double().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v)
        )
        later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        scores = (mine @ k_seen.mT * scale).masked_fill(later, float("-inf"))
        result = (scores.softmax(-1) @ v_seen).transpose(0, 1).to(q.dtype)
        out = out.index_copy(0, torch.arange(first, first + queries), result)
    return out


def score(logits: Tensor, targets: Tensor, divisors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-prob of ``targets``, the log-sum-exp and the entropy, float32 ``[r]``, of
    ``logits / divisors``, of which logits are ``[r, vocab]`` and divisors float32 ``[r]``."""
    kernels = kernels_for(logits)
    if kernels is not None:
        with torch.cuda.device_of(logits):
            found: tuple[Tensor, Tensor, Tensor] = kernels.score(logits, targets, divisors)
        return found
    wide = (logits.float() / divisors[:, None]).double()
    log_sum = wide.logsumexp(-1)
    log_probs = wide.gather(1, targets[:, None])[:, 0] - log_sum
    entropy = log_sum - (wide.softmax(-1) * wide).sum(-1)
    return log_probs.float(), log_sum.float(), entropy.float()
