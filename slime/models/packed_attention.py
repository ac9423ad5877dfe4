"""Attention over a pack, as an implementation of transformers' AttentionInterface.

A model loaded with ``attn_implementation="slime_packed"`` gets its batch as one row ``[1, T]``. The
keyword arguments of its forward include ``position_ids`` and ``slime_pack=PackSegments``, which
transformers passes on to the attention of each layer. transformers makes no attention mask, because
this name is not one of its mask functions.

On CUDA in bf16/fp16, FlashAttention 4 (``flash_attention.py``) or torch's varlen attention is used;
on the CPU, ``cpu_kernels.py``. All have attention sinks. What none of them supports (sliding windows
on the CPU, float32 on CUDA, value heads of another size on the CPU, soft caps) is computed with one
mask for all segments of equal size. Kinds of attention that would be silently wrong here are
refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from slime.models.autograd import Context, Gradients
from slime.models.cpu_kernels import packed_attention_cpu
from slime.models.flash_attention import can_attend, flash_attention_4
from slime.models.layer_kinds import window_of
from slime.models.loading import ModelError
from slime.models.masked_attention import (
    UNCHANGED,
    ScoreChanges,
    attend_to_selected,
    masked_attention,
    same_image,
)
from slime.models.segments import PackSegments, gather_rows, heads_to_rows, rows_to_heads

NAME = "slime_packed"
# torch 2.11 has no such parameter
_NAMES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
QUERIES_AT_ONCE = 512
"""The most queries of a segment whose scores are held at a time, where a mask is needed."""
UNSUPPORTED = {
    "sinks": "attention sinks that it passes as 'sinks'",
    "position_bias": "position biases",
}


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    slime_pack: PackSegments | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    indices: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The AttentionInterface function: query ``[1, H, T, d]``, key/value ``[1, H_kv, T, d]`` ->
    ``[1, T, H, d]``. ``indices`` are the keys that an indexer selects, which replace the mask.

    Raises:
        ModelError: The model needs a kind of attention that is not supported.
    """
    mask = attention_mask if indices is None else None
    _check(module, query, mask, dropout, slime_pack, kwargs)
    assert slime_pack is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    seen = window_of(module, sliding_window)
    window = -1 if seen is None else int(seen) - 1
    selected = indices[0] if indices is not None and indices.shape[2] else None
    out = attend(q, k, v, slime_pack, scale, window, ScoreChanges(s_aux, softcap), selected)
    return out.unsqueeze(0), None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pack: PackSegments,
    scale: float,
    window: int = -1,
    changes: ScoreChanges = UNCHANGED,
    selected: Tensor | None = None,
) -> Tensor:
    """Compute exact attention over a pack with the fastest kernel that supports it.

    Args:
        q: ``[T, H, d]``; k: ``[T, H_kv, d]``; v: ``[T, H_kv, d_v]``. With context parallelism, the
            rows of this rank; keys and values may be gathered already.
        window: Maximum number of keys before a query that it attends to; -1: all.
        changes: Attention sinks and the soft cap of the scores.
        selected: The keys that an indexer selects (:mod:`slime.models.masked_attention`).

    Returns:
        ``[T, H, d_v]``.
    """
    if window >= pack.max_k - 1:
        window = -1  # no segment is longer
    if pack.image_blocks is not None:
        return padded_attention(q, k, v, pack, scale, window, changes)
    if pack.whole is not None:
        return _attend_by_heads(q, k, v, pack, scale, window, changes, selected)
    if pack.group is not None and len(k) == len(q):
        # Queries stay where they are: with grouped-query attention keys and values are several
        # times smaller.
        k = gather_rows(k, pack.group)
        v = gather_rows(v, pack.group)
    if selected is not None:
        return attend_to_selected(q, k, v, pack, scale, selected)
    size = v.shape[-1]
    if has_varlen_kernel(q) and size <= k.shape[-1] and not changes.softcap:
        if size < k.shape[-1]:
            # the kernel needs one head size for all three (MLA has 192 and 128)
            v = F.pad(v, (0, k.shape[-1] - size))
        return _varlen(q, k, v, pack, scale, window, changes.sinks)[..., :size]
    if (
        q.device.type == "cpu"
        and window < 0
        and k.shape[-1] == size
        and pack.group is None
        and not changes.softcap
    ):
        return packed_attention_cpu(q, k, v, pack, scale, changes.sinks)
    return padded_attention(q, k, v, pack, scale, window, changes)


def _attend_by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pack: PackSegments,
    scale: float,
    window: int,
    changes: ScoreChanges,
    selected: Tensor | None,
) -> Tensor:
    """Attend over the rows of all context-parallel ranks with this rank's share of the heads, and
    return all heads of its rows.

    Source: Jacobs et al. 2023, DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509.

    Raises:
        ModelError: The ranks cannot divide the heads.
    """
    group, sinks = pack.group, changes.sinks
    assert group is not None and pack.whole is not None
    size = group.size()
    if q.shape[1] % size:
        raise ModelError(
            f"--context-parallel-kind ulysses: {size} ranks cannot divide {q.shape[1]} attention "
            "heads: use a --context-parallel-size that divides them, or gather"
        )
    # Ranks that share a head of keys and values each get a copy.
    copies = size // math.gcd(size, k.shape[1])
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    q, k, v = (rows_to_heads(x, group) for x in (q, k, v))
    own = sinks if sinks is None else sinks.chunk(size)[group.rank()]
    selected = None if selected is None else gather_rows(selected, group)
    changes = ScoreChanges(own, changes.softcap)
    out = attend(q, k, v, pack.whole, scale, window, changes, selected)
    return heads_to_rows(out, group)


def _check(
    module: nn.Module,
    query: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    pack: PackSegments | None,
    kwargs: Mapping[str, object],
) -> None:
    name = type(module).__name__
    for key, what in UNSUPPORTED.items():
        if kwargs.get(key) is not None:
            raise ModelError(
                f"{name} uses {what}, which packed attention lacks: use --attn-implementation eager"
            )
    if pack is None:
        raise ModelError(
            f"{name} does not pass the pack to its attention: use --attn-implementation sdpa"
        )
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise ModelError(f"{name} is not causal: use --attn-implementation sdpa")
    if attention_mask is not None:
        raise ModelError(f"{name} makes its own attention mask: use --attn-implementation sdpa")
    if dropout:
        raise ModelError(
            f"{name} has attention dropout {dropout}: set attention_dropout to 0 in config.json"
        )
    if query.shape[0] != 1 or query.shape[2] != pack.num_tokens:
        shape = (query.shape[0], query.shape[2])
        raise ModelError(
            f"{name} got queries for (batch, tokens) = {shape}, but the pack is (1, "
            f"{pack.num_tokens})"
        )


def has_varlen_kernel(q: Tensor) -> bool:
    """Return whether torch's attention over packed rows has a kernel for the device and the dtype
    of ``q``.
    """
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pack: PackSegments,
    scale: float,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    if pack.kv_index is not None:
        k = k.index_select(0, pack.kv_index)
        v = v.index_select(0, pack.kv_index)
    if can_attend(q, k, v):
        sizes = pack.cu_seqlens_q, pack.cu_seqlens_k, pack.max_q, pack.max_k
        return flash_attention_4(q, k, v, *sizes, scale, window, sinks)
    if sinks is not None:
        return varlen_with_sinks(q, k, v, sinks, pack, scale, window)
    extra: dict[str, Any] = {"enable_gqa": True} if _NAMES_GQA and k.shape[1] != q.shape[1] else {}
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        pack.cu_seqlens_q,
        pack.cu_seqlens_k,
        pack.max_q,
        pack.max_k,
        scale=scale,
        window_size=(window, 0),
        **extra,
    )
    assert isinstance(out, Tensor)  # a pair only when more than the output is asked for
    return out


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pack: PackSegments,
    scale: float,
    window: int = -1,
    changes: ScoreChanges = UNCHANGED,
) -> Tensor:
    """Compute attention with boolean masks, for everything that the faster kernels do not support.

    Args:
        q: ``[T, H, d]``; k: ``[T, H_kv, d]``; v: ``[T, H_kv, d_v]``.
        window: Maximum number of keys before a query that it attends to; -1: all.
        changes: Attention sinks and the soft cap of the scores.
    """
    blocks = key_blocks = pack.image_blocks
    if pack.kv_index is not None:
        k = k.index_select(0, pack.kv_index)
        v = v.index_select(0, pack.kv_index)
        key_blocks = None if blocks is None else blocks.index_select(0, pack.kv_index)
    # Segments of equal sizes share one mask and one call, and need no padding.
    buckets: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for span in pack.spans:
        buckets.setdefault((span[1] - span[0], span[3] - span[2]), []).append(span)
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    for segments in buckets.values():
        rows = torch.cat(
            [torch.arange(start, end, device=q.device) for start, end, _, _ in segments]
        )
        keys = torch.cat(
            [torch.arange(start, end, device=q.device) for _, _, start, end in segments]
        )
        queries, *keys_values = (
            x.index_select(0, index).unflatten(0, (len(segments), -1)).transpose(1, 2)
            for x, index in ((q, rows), (k, keys), (v, keys))
        )
        if blocks is not None and key_blocks is not None:
            shape = queries.shape[2], keys_values[0].shape[2]
            of_queries, of_keys = (
                x.index_select(0, index).unflatten(0, (len(segments), -1))
                for x, index in ((blocks, rows), (key_blocks, keys))
            )
            causal, near = _masks(*shape, window, q.device)
            mask = ((causal | same_image(of_queries, of_keys)) & near).unsqueeze(1)
            part = masked_attention(queries, keys_values[0], keys_values[1], mask, scale, changes)
        else:
            part = _masked_attention(
                queries, keys_values[0], keys_values[1], scale, window, changes
            )
        out = out.index_copy(0, rows, part.transpose(1, 2).flatten(0, 1))
    return out


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, changes: ScoreChanges
) -> Tensor:
    """Attend over equal segments: q ``[n, H, L_q, d]``, k ``[n, H_kv, L_k, d]`` -> ``[n, H, L_q,
    d_v]``.
    """
    (q_len, k_len), parts = (q.shape[2], k.shape[2]), []
    step = q_len if changes.none and window < 0 else QUERIES_AT_ONCE
    for start in range(0, q_len, step):
        end = min(start + step, q_len)
        # the queries are the last tokens, so no key after these is attended to
        seen = k_len - q_len + end
        first = max(0, seen - (end - start) - window) if window >= 0 else 0
        causal, near = _masks(end - start, seen - first, window, q.device)
        mask = causal & near if window >= 0 else causal
        arguments = q[:, :, start:end], k[:, :, first:seen], v[:, :, first:seen], mask, scale
        parts.append(masked_attention(*arguments, changes))
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _masks(q_len: int, k_len: int, window: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which keys are not after a query, and which are not too far before it, both bool
    ``[q_len, k_len]``. They are aligned at the bottom right: the queries are the last tokens.
    """
    query = torch.arange(k_len - q_len, k_len, device=device)[:, None]
    key = torch.arange(k_len, device=device)[None, :]
    return key <= query, key >= query - (window if window >= 0 else k_len)


AttentionInterface.register(NAME, packed_attention)


class _VarlenSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        pack: PackSegments,
        scale: float,
        window: int,
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
    """Attend over a pack in bfloat16 or float16: q ``[T, H, d]``, k and v ``[K, H_kv, d]``, sinks
    ``[H]``.

    Args:
        window: Maximum number of keys before a query that it attends to; -1: all.

    Returns:
        ``[T, H, d]``.
    """
    return _VarlenSinks.apply(
        q.contiguous(), k.contiguous(), v.contiguous(), sinks, pack, scale, window
    )
