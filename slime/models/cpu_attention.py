"""Exact attention over packed segments on the CPU, without padding the pack and without a T×T mask.

Each segment attends causally to itself (buckets of similar length, one flash kernel call each), and the
segments that share a prompt attend to it together: their queries form one long row against one copy of
the prompt's keys. The two softmaxes are joined by their log-sum-exp:

    out = Σ_b exp(lse_b - lse) · out_b,   lse = log Σ_b exp(lse_b)

Backward runs the kernel's own backward on each block with the joint ``out`` and ``lse``: the probabilities
that it recomputes, exp(q·k − lse), are then those of the joint softmax (as in ring attention, Liu et al.
2023, https://arxiv.org/abs/2310.01889).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime.models.segments import OwnBlock, PackSegments

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def packed_attention_cpu(q: Tensor, k: Tensor, v: Tensor, pack: PackSegments, scale: float) -> Tensor:
    """Attention of one pack.

    Args:
        q: ``[T, H, d]``; k, v: ``[T, H_kv, d]``, H a multiple of H_kv.

    Returns:
        ``[T, H, d]``.
    """
    return _PackedAttention.apply(q, k, v, pack, scale)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pack: PackSegments, scale: float) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for block in pack.own:
            block_out, block_lse = _flash(*(_pad(x, block) for x in (q, k, v)), is_causal=True, scale=scale)
            out.index_copy_(0, block.rows, _unpad(block_out, block))
            lse.index_copy_(0, block.rows, _unpad(block_lse, block))
        for prefix in pack.prefixes:
            rows = prefix.rows
            keys = slice(prefix.start, prefix.end)
            picked = (_heads_first(x) for x in (q.index_select(0, rows), k[keys], v[keys]))
            block_out, block_lse = _flash(*picked, scale=scale)
            _join(out, lse, rows, block_out[0].transpose(0, 1), block_lse[0].transpose(0, 1))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pack, ctx.scale = pack, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        pack, scale, grad = ctx.pack, ctx.scale, grads[0].contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for block in pack.own:
            padded = (_pad(x, block) for x in (grad, q, k, v, out, lse))
            parts = _flash_backward(*padded, 0.0, True, scale=scale)
            for whole, part in zip((dq, dk, dv), parts, strict=True):
                whole.index_copy_(0, block.rows, _unpad(part, block))
        for prefix in pack.prefixes:
            rows, keys = prefix.rows, slice(prefix.start, prefix.end)
            grad_rows, q_rows, out_rows, lse_rows = (x.index_select(0, rows) for x in (grad, q, out, lse))
            picked = (_heads_first(x) for x in (grad_rows, q_rows, k[keys], v[keys], out_rows, lse_rows))
            parts = _flash_backward(*picked, 0.0, False, scale=scale)
            dq.index_add_(0, rows, parts[0][0].transpose(0, 1))
            dk[keys] += parts[1][0].transpose(0, 1)
            dv[keys] += parts[2][0].transpose(0, 1)
        return dq, dk, dv, None, None


def _join(out: Tensor, lse: Tensor, rows: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Fold a block's result for ``rows`` into what is there; ``[N, H, d]`` and ``[N, H]``."""
    mine, mine_lse = out.index_select(0, rows), lse.index_select(0, rows)
    joint = torch.logaddexp(mine_lse, other_lse)
    weight = (other_lse - joint).exp().unsqueeze(-1).to(mine.dtype)
    out.index_copy_(0, rows, torch.lerp(mine, other, weight))
    lse.index_copy_(0, rows, joint)


def _pad(x: Tensor, block: OwnBlock) -> Tensor:
    """``[T, H, ...]`` -> ``[n, H, length, ...]``, zeros behind each segment."""
    picked = x.index_select(0, block.rows)
    if len(block.slots) != block.n * block.length:
        padded = x.new_zeros((block.n * block.length, *x.shape[1:]))
        picked = padded.index_copy_(0, block.slots, picked)
    return picked.unflatten(0, (block.n, block.length)).transpose(1, 2)


def _unpad(x: Tensor, block: OwnBlock) -> Tensor:
    """``[n, H, length, ...]`` -> ``[N, H, ...]``, in the order of the block's rows."""
    flat = x.transpose(1, 2).flatten(0, 1)
    return flat if len(block.slots) == len(flat) else flat.index_select(0, block.slots)


def _heads_first(x: Tensor) -> Tensor:
    """``[N, H, ...]`` -> ``[1, H, N, ...]``."""
    return x.transpose(0, 1).unsqueeze(0)
