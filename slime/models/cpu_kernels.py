"""Float32 matrix products and packed attention on the CPU.

**Products**: ``torch.nn.functional.linear`` computes float32 products with the BLAS library that
torch was built with. If this is MKL and the processor is not made by Intel, MKL only uses its AVX2
code. On an AMD EPYC with AVX-512, two cores and the shapes of SmolLM2, this gives 175–190 GFLOP/s,
and oneDNN, which selects its code by the features of the processor, gives 380–430 GFLOP/s. Both
compute float32 products, but sum in a different order. The operator is the one that the CPU backend
of torch.compile emits. It has no gradient, so the forward and backward of a linear layer are
implemented here. It is used if the input of a module is a float32 CPU tensor; otherwise
``torch.nn.functional.linear`` is used.

**Attention**: It is exact, without padding of the pack and without a T×T mask.
Each segment attends causally to itself; segments of similar length are computed together. The
segments that share a prompt attend to the prompt together: their queries form one matrix, which is
multiplied with a single copy of the prompt's keys. The two softmaxes of a query are joined with
their log-sum-exp:

    out = Σ_b exp(lse_b − lse) · out_b,   lse = log Σ_b exp(lse_b)

Backward is computed for each block with the joint ``out`` and ``lse``. The probabilities that it
recomputes, exp(q·k − lse), are then those of the joint softmax (as in ring attention, Liu et al.
2023, https://arxiv.org/abs/2310.01889).

An attention sink, as in gpt-oss, is one more block of a single key with a learned score and the
value 0. So it is joined in the same way, and the backward of the other blocks needs no change.

Queries are stored as ``[H_kv, T, g, d]``, where g is the number of query heads per key-value head.
So the rows of consecutive tokens are one matrix per key-value head. Blocks whose scores fit the
cache of a core are computed as plain matrix products, which are 3–4 times as fast as torch's flash
kernel there. Larger blocks use the flash kernel.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slime.models.autograd import Context, Gradients
from slime.models.segments import Block, PackSegments, PrefixBlock

MIN_ROWS = 4
"""With fewer rows, MKL's matrix-vector code is faster."""


@functools.cache
def onednn_available() -> bool:
    """Return whether this build of torch has the operator, and the processor has AVX-512, which
    makes it faster.
    """
    return (
        torch.backends.mkldnn.is_available()
        and "AVX512" in torch.backends.cpu.get_cpu_capability()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def matmul_nt(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b.T`` for ``a [M, K]`` and ``b [N, K]``, which may be strided views. It has no
    gradient.
    """
    # oneDNN does not support empty products
    fits = a.shape[0] >= MIN_ROWS and a.shape[1] > 0 and b.shape[0] > 0
    if (
        fits
        and a.device.type == "cpu"
        and a.dtype == b.dtype == torch.float32
        and onednn_available()
    ):
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return a @ b.t()


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        flat = grad.reshape(-1, grad.shape[-1])
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            matmul_nt(flat, weight.t()).view_as(x) if need_x else None,
            matmul_nt(flat.t(), x.reshape(-1, x.shape[-1]).t()) if need_weight else None,
            flat.sum(0) if need_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, ``[..., out]``, with gradients, computed by the fastest
    method for these tensors:
    ``x`` ``[..., in]``, ``weight`` ``[out, in]`` and ``bias`` ``[out]``."""
    if (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and weight.dtype == torch.float32
        and x.numel() >= MIN_ROWS * x.shape[-1]
        and onednn_available()
    ):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return _OneDnnLinear.apply(x, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class CpuLinear(nn.Linear):
    """An ``nn.Linear`` whose forward uses :func:`linear`. Its parameters and their names are the
    same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_onednn_linears(model: nn.Module) -> int:
    """Change the plain ``nn.Linear`` modules of a model to :class:`CpuLinear`, and return their
    number.
    """
    if not onednn_available():
        return 0
    # Subclasses of nn.Linear are left alone, because they may have their own forward.
    plain = [module for module in model.modules() if type(module) is nn.Linear]
    for module in plain:
        module.__class__ = CpuLinear
    return len(plain)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

SCORE_BYTES = 16 * 1024 * 1024
"""The most bytes of scores that are computed at a time. If a single matrix is larger, the flash
kernel is used.
"""


def packed_attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, pack: PackSegments, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute the attention of one pack.

    Args:
        q: The queries, ``[T, H, d]``, where H is a multiple of H_kv.
        k, v: The keys and values, ``[T, H_kv, d]``.
        pack: The segments of the pack.
        sinks: The score of each head's sink, ``[H]``; None without sinks.

    Returns:
        The outputs, ``[T, H, d]``.
    """
    kv_heads = k.shape[1]
    by_head = q.unflatten(1, (kv_heads, -1)).transpose(0, 1)
    # [H_kv, 1, g], so that it broadcasts to the log-sum-exp of the queries
    sinks = None if sinks is None else sinks.unflatten(0, (kv_heads, 1, -1))
    out = _PackedAttention.apply(by_head, k.transpose(0, 1), v.transpose(0, 1), sinks, pack, scale)
    return out.transpose(0, 1).flatten(1, 2)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        pack: PackSegments,
        scale: float,
    ) -> Tensor:
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for block in pack.own:
            queries, keys, values = (_pick(x, block) for x in (q, k, v))
            block_out, block_lse = _attend(queries.flatten(1, 2), keys, values, scale, block.length)
            _put(out, block, block_out)
            _put(lse, block, block_lse)
        # A row attends to its own segment and to the prompt that it shares with other segments.
        # Each of the two parts is a softmax; _join weighs them with their log-sum-exp, as flash
        # attention joins blocks of keys. So the prompt needs only one matrix product for all
        # segments that share it.
        for prefix in pack.prefixes:
            prompt = slice(prefix.start, prefix.end)
            block_out, block_lse = _attend(
                _rows(q, prefix).flatten(1, 2), k[:, prompt], v[:, prompt], scale, None
            )
            _join(out, lse, prefix, block_out, block_lse)
        if sinks is not None:
            joint = torch.logaddexp(lse, sinks.to(lse.dtype))
            out.mul_((lse - joint).exp_().unsqueeze(-1).to(out.dtype))
            lse = joint
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.settings = pack, scale
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        (pack, scale), grad = ctx.settings, grads[0].contiguous()
        dq = torch.empty_like(q)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        for block in pack.own:
            keys = _pick(k, block)
            values = _pick(v, block)
            mine = [_pick(x, block).flatten(1, 2) for x in (grad, q, out, lse)]
            parts = _attend_backward(
                mine[0], mine[1], keys, values, mine[2], mine[3], scale, block.length
            )
            for whole, part in zip((dq, dk, dv), parts, strict=True):
                _put(whole, block, part)
        for prefix in pack.prefixes:
            prompt = slice(prefix.start, prefix.end)
            mine = [_rows(x, prefix).flatten(1, 2) for x in (grad, q, out, lse)]
            parts = _attend_backward(
                mine[0], mine[1], k[:, prompt], v[:, prompt], mine[2], mine[3], scale, None
            )
            dq_rows = parts[0].view(q.shape[0], -1, *q.shape[2:])
            if prefix.contiguous:
                _rows(dq, prefix).add_(dq_rows)
            else:
                dq.index_add_(1, prefix.rows, dq_rows)
            # The prompt is also a segment of its own, so these gradients are added to those of the
            # loop above.
            dk[:, prompt] += parts[1]
            dv[:, prompt] += parts[2]
        return dq, dk, dv, _sinks_backward(grad, sinks, out, lse), None, None


def _sinks_backward(grad: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor) -> Tensor | None:
    """Return the gradient of the sinks, ``[H_kv, 1, g]``: −Σ p·(grad·out), where p is the softmax's
    part on the sink."""
    if sinks is None:
        return None
    share = (sinks.to(lse.dtype) - lse).exp_()
    return (
        share.mul_((grad.to(lse.dtype) * out).sum(-1)).sum(1, keepdim=True).neg_().to(sinks.dtype)
    )


# --- one block: q [B, M, d], k and v [B, N, d]; with ``length`` M = length·g, N = length, causal
# ---


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, length: int | None
) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, M, d]`` and the log-sum-exp ``[B, M]`` of one block."""
    step = _matrices_at_once(q, k)
    if step == 0:
        return _flash_attend(q, k, v, scale, length)
    mask = _causal_mask(length, q.shape[1] // length) if length is not None else None
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for i in range(0, q.shape[0], step):
        part = slice(i, i + step)
        scores = _scores(q[part], k[part], scale, mask)
        largest = scores.amax(-1, keepdim=True)
        weights = scores.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        out[part] = torch.bmm(weights.to(v.dtype), v[part]).div_(total)
        lse[part] = total.log_().add_(largest).squeeze(-1)
    return out, lse


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    length: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of one block, given the joint ``out`` and ``lse``."""
    step = _matrices_at_once(q, k)
    if step == 0:
        return _flash_attend_backward(grad, q, k, v, out, lse, scale, length)
    mask = _causal_mask(length, q.shape[1] // length) if length is not None else None
    dq = torch.empty_like(q)
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    for i in range(0, q.shape[0], step):
        part = slice(i, i + step)
        weights = _scores(q[part], k[part], scale, mask).sub_(lse[part].unsqueeze(-1)).exp_()
        delta = (grad[part].to(lse.dtype) * out[part]).sum(-1, keepdim=True)
        dscores = (
            torch.bmm(grad[part], v[part].transpose(1, 2))
            .to(lse.dtype)
            .sub_(delta)
            .mul_(weights)
            .mul_(scale)
        )
        dscores = dscores.to(q.dtype)
        weights = weights.to(q.dtype)
        dq[part] = torch.bmm(dscores, k[part])
        dk[part] = torch.bmm(dscores.transpose(1, 2), q[part])
        dv[part] = torch.bmm(weights.transpose(1, 2), grad[part])
    return dq, dk, dv


def _matrices_at_once(q: Tensor, k: Tensor) -> int:
    return SCORE_BYTES // (4 * q.shape[1] * k.shape[1])


def _scores(q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    scores = (
        torch.bmm(q, k.transpose(1, 2)).to(torch.promote_types(q.dtype, torch.float32)).mul_(scale)
    )
    return scores if mask is None else scores.add_(mask)


def _causal_mask(length: int, groups: int) -> Tensor:
    """Return a float mask ``[length·g, length]``: 0 for keys up to the query's own position, −inf
    after it.
    """
    mask = torch.full((length, length), -torch.inf).triu_(1)
    return mask.repeat_interleave(groups, 0)


def _flash_attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, length: int | None
) -> tuple[Tensor, Tensor]:
    groups = 1 if length is None else q.shape[1] // length
    out, lse = _flash(
        _heads(q, groups),
        _repeated(k, groups),
        _repeated(v, groups),
        is_causal=length is not None,
        scale=scale,
    )
    return out.transpose(1, 2).reshape(q.shape), lse.transpose(1, 2).reshape(q.shape[:2])


def _flash_attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    length: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = 1 if length is None else q.shape[1] // length
    dq, dk, dv = _flash_backward(
        _heads(grad, groups),
        _heads(q, groups),
        _repeated(k, groups),
        _repeated(v, groups),
        _heads(out, groups),
        _heads(lse.unsqueeze(-1), groups).squeeze(-1),
        0.0,
        length is not None,
        scale=scale,
    )
    return dq.transpose(1, 2).reshape(q.shape), dk.sum(1), dv.sum(1)


def _heads(x: Tensor, groups: int) -> Tensor:
    """``[B, L·g, d]`` -> ``[B, g, L, d]``."""
    return x.unflatten(1, (-1, groups)).transpose(1, 2)


def _repeated(x: Tensor, groups: int) -> Tensor:
    """``[B, L, d]`` -> ``[B, g, L, d]``. Some versions of the kernel need as many key-value heads
    as query heads.
    """
    return x.unsqueeze(1).expand(-1, groups, -1, -1).contiguous()


# --- rows of blocks; x is [H_kv, T, ...] ---


def _pick(x: Tensor, block: Block) -> Tensor:
    """``[H_kv, T, ...]`` -> ``[H_kv·n, length, ...]``, with zeros after each segment that is
    shorter than the block.
    """
    picked = x.index_select(1, block.rows)
    if block.slots is not None:
        padded = x.new_zeros((x.shape[0], block.n * block.length, *x.shape[2:]))
        picked = padded.index_copy_(1, block.slots, picked)
    return picked.view(x.shape[0] * block.n, block.length, *x.shape[2:])


def _put(whole: Tensor, block: Block, part: Tensor) -> None:
    """Write the rows of a block to their places in ``whole``, the inverse of :func:`_pick`."""
    flat = part.reshape(whole.shape[0], block.n * block.length, *whole.shape[2:])
    whole.index_copy_(
        1, block.rows, flat if block.slots is None else flat.index_select(1, block.slots)
    )


def _rows(x: Tensor, prefix: PrefixBlock) -> Tensor:
    """Return the queries that attend to the prefix, ``[H_kv, N, ...]``; as a view if they are
    contiguous.
    """
    if prefix.contiguous:
        first = int(prefix.rows[0])
        return x[:, first : first + len(prefix.rows)]
    return x.index_select(1, prefix.rows)


def _join(out: Tensor, lse: Tensor, prefix: PrefixBlock, other: Tensor, other_lse: Tensor) -> None:
    """Join the result of a prefix block with the result so far, in ``out`` and ``lse``."""
    mine = _rows(out, prefix)
    mine_lse = _rows(lse, prefix)
    other = other.view_as(mine)
    other_lse = other_lse.view_as(mine_lse)
    joint = torch.logaddexp(mine_lse, other_lse)
    # The part of the joint softmax that is on the prompt. With logaddexp, this is exact even if one
    # part is much larger than the other.
    weight = (other_lse - joint).exp_().unsqueeze(-1).to(mine.dtype)
    joined = torch.lerp(mine, other, weight)
    if prefix.contiguous:
        mine.copy_(joined)
        mine_lse.copy_(joint)
    else:
        out.index_copy_(1, prefix.rows, joined)
        lse.index_copy_(1, prefix.rows, joint)
