"""Varlen attention with attention sinks on CUDA, with torch's flash attention kernels.

A sink joins the softmax of a query as one more key of the value 0. So the output is that of the kernel times
``exp(lse − joint)``, where ``joint = log(exp(lse) + exp(sink))``. Backward gives the kernel the joint output and
log-sum-exp; the probabilities that it recomputes, ``exp(q·k − joint)``, are then those of the joint softmax, as in
``cpu_attention.py``. ``varlen_attn`` has no gradient of its log-sum-exp, so this calls the operators below it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.models.autograd import Context, Gradients
from slime.models.segments import PackSegments


class _VarlenSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, pack: PackSegments, scale: float, window: int
    ) -> Tensor:
        sizes = pack.cu_seqlens_q, pack.cu_seqlens_k, pack.max_q, pack.max_k
        bounds = {"scale": scale, "window_size_left": window, "window_size_right": 0}
        out, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *sizes, 0.0, window < 0, False, **bounds
        )
        joint = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])  # [H, T]
        out = out * (lse - joint).exp_().t().unsqueeze(-1).to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, joint, seed, unused)
        ctx.settings = sizes, bounds, window
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        q, k, v, sinks, out, joint, seed, unused = ctx.saved_tensors
        (sizes, bounds, window), grad = ctx.settings, grads[0].contiguous()
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, joint, *sizes, 0.0, window < 0, seed, unused, **bounds
        )
        share = (sinks.to(joint.dtype)[:, None] - joint).exp_()
        dsinks = -(share * (grad.float() * out.float()).sum(-1).t()).sum(1)
        return dq, dk, dv, dsinks.to(sinks.dtype), None, None, None


def varlen_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, pack: PackSegments, scale: float, window: int
) -> Tensor:
    """Attend over a pack in bfloat16 or float16: q ``[T, H, d]``, k and v ``[K, H_kv, d]``, sinks ``[H]``.

    Args:
        window: Maximum number of keys before a query that it attends to; -1: all.

    Returns:
        ``[T, H, d]``.
    """
    return _VarlenSinks.apply(q.contiguous(), k.contiguous(), v.contiguous(), sinks, pack, scale, window)
