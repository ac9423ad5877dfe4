"""Triton kernels in which the result of a row depends on this row alone.

The tiles of a kernel, and the order of its sums, are the same for any number of rows, so a token
has the same bits in a pack of thousands and in a step of decode. Tensors are contiguous: one
kernel is compiled for each model, not one for trainers and one for engines.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS = 128
COLUMNS = 256
DEPTH = 64
BAND = 8
"""The tile of a matrix product, and how many rows of tiles run side by side."""
PROGRAMS = 132
"""As many as an H100 or H200 has processors."""
QUERIES = 64
KEYS = 64
"""The tile of attention."""


@triton.jit(do_not_specialize=["m"])
def _matmul(
    x,
    w,
    bias,
    out,
    m,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    tiles_m = tl.cdiv(m, BM)
    tiles = tiles_m * tl.cdiv(n, BN)
    in_band = BAND * tl.cdiv(n, BN)
    # A program computes one tile after the other, so that it loads the next one meanwhile.
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        # Some rows of tiles together, so that their parts of x and w stay in the cache.
        first = tile // in_band * BAND
        height = min(tiles_m - first, BAND)
        row = (first + tile % in_band % height) * BM
        column = tile % in_band // height * BN
        total = tl.zeros((BM, BN), tl.float32)
        for start in range(0, k, BK):
            total = tl.dot(x.load([row, start]), w.load([column, start]).T, total)
        if HAS_BIAS:
            columns = column + tl.arange(0, BN)
            total += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
        out.store([row, column], total.to(out.dtype))


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias``: ``[m, k]`` and ``[n, k]`` to ``[m, n]``, summed in float32.
    n and k are multiples of 8."""
    (m, k) = x.shape
    n = weight.shape[0]
    out = x.new_empty(m, n)
    blocks = ((x, (ROWS, DEPTH)), (weight, (COLUMNS, DEPTH)), (out, (ROWS, COLUMNS)))
    parts = [TensorDescriptor.from_tensor(tensor, list(block)) for tensor, block in blocks]
    tiles = triton.cdiv(m, ROWS) * triton.cdiv(n, COLUMNS)
    _matmul[(min(PROGRAMS, tiles),)](
        parts[0],
        parts[1],
        bias,
        parts[2],
        m,
        n,
        k,
        bias is not None,
        PROGRAMS,
        ROWS,
        COLUMNS,
        DEPTH,
        BAND,
        num_warps=8,
        num_stages=3,
    )
    return out


@triton.jit(do_not_specialize=["total", "count"])
def _attend(
    q,
    k,
    v,
    out,
    lse,
    spans,
    table,
    scale,
    total,
    count,
    HAS_TABLE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    segment = tl.program_id(1)
    kv_head = tl.program_id(2)
    q_start = tl.load(spans + segment)
    q_len = tl.load(spans + count + segment)
    k_start = tl.load(spans + 2 * count + segment)
    k_len = tl.load(spans + 3 * count + segment)
    first = tl.program_id(0) * BM
    if first < q_len * GROUP:
        # A row of the tile is one query of one head: all heads that share the keys, then the next
        # query.
        row = first + tl.arange(0, BM)
        query = row // GROUP
        head = kv_head * GROUP + row % GROUP
        valid = query < q_len
        position = tl.where(valid, k_len - q_len + query, 0)
        size = tl.arange(0, SIZE)
        place = ((q_start + query) * HEADS + head)[:, None] * SIZE + size[None, :]
        queries = tl.load(q + place, mask=valid[:, None], other=0.0)
        largest = tl.full((BM,), float("-inf"), tl.float32)
        weight = tl.zeros((BM,), tl.float32)
        mean = tl.zeros((BM, SIZE), tl.float32)
        # Blocks of keys begin at the first token of the sequence. For a query, blocks after its
        # own token add exactly nothing.
        last = min((first + BM - 1) // GROUP, q_len - 1)
        for start in range(0, k_len - q_len + last + 1, BN):
            key = start + tl.arange(0, BN)
            there = key < k_len
            slot = tl.load(table + k_start + key, there, 0) if HAS_TABLE else k_start + key
            at = (slot.to(tl.int64) * (HEADS // GROUP) + kv_head)[:, None] * SIZE + size[None, :]
            scores = tl.dot(queries, tl.trans(tl.load(k + at, there[:, None], 0.0))) * scale
            scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
            larger = tl.maximum(largest, tl.max(scores, 1))
            factor = tl.exp2(largest - larger)
            p = tl.exp2(scores - larger[:, None])
            weight = weight * factor + tl.sum(p, 1)
            values = tl.load(v + at, there[:, None], 0.0)
            mean = tl.dot(p.to(values.dtype), values, mean * factor[:, None])
            largest = larger
        mean = (mean / weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + place, mean, mask=valid[:, None])
        log_sum = (largest + tl.log2(weight)) * 0.6931471805599453
        tl.store(lse + head * total + q_start + query, log_sum, mask=valid)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor,
    longest: int,
    scale: float,
    table: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend causally over segments, whose queries are the last of their tokens.

    Args:
        q: ``[T, H, d]``; k, v: ``[K, H_kv, d]``, in which the keys of a segment are consecutive.
        spans: int64 ``[4, segments]``: the first query, the number of queries, the first key and
            the number of keys.
        longest: The largest number of queries.
        table: int32, the places of consecutive keys in ``k`` and ``v``, into which the spans then
            point; None if keys are consecutive there.

    Returns:
        ``[T, H, d]``, and the log-sum-exp of the scores, float32 ``[H, T]``; 0 for rows of no
        segment.
    """
    rows, heads, size = q.shape
    group = heads // k.shape[1]
    out = torch.zeros_like(q)
    lse = q.new_zeros(heads, rows, dtype=torch.float32)
    grid = (triton.cdiv(longest * group, QUERIES), spans.shape[1], k.shape[1])
    _attend[grid](
        q,
        k,
        v,
        out,
        lse,
        spans,
        table,
        scale * 1.4426950408889634,
        *(rows, spans.shape[1]),
        table is not None,
        *(heads, group, size),
        *(QUERIES, KEYS),
        num_warps=4,
        num_stages=3,
    )
    return out, lse


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(x, weight, out, rows, eps, WIDTH: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BW)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = row[:, None] * WIDTH + column[None, :]
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    normed = (wide * scale[:, None]).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + place, (normed * factor[None, :]).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight * x / rms(x)`` of rows ``[n, width]``."""
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    together = max(2048 // block, 1)
    _rms_norm[(triton.cdiv(rows, together),)](
        x, weight, out, rows, eps, width, together, block, num_warps=4
    )
    return out


@triton.jit
def _rotate(
    x, cos, sin, out, SIGN: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BH)
    half = tl.arange(0, HALF)
    c = tl.load(cos + token * (2 * HALF) + half).to(tl.float32)[None, :]
    s = SIGN * tl.load(sin + token * (2 * HALF) + half).to(tl.float32)[None, :]
    place = (token * HEADS + head)[:, None] * (2 * HALF) + half[None, :]
    inside = (head < HEADS)[:, None]
    a = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + place + HALF, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + place, (a * c - b * s).to(kind), mask=inside)
    tl.store(out + place + HALF, (b * c + a * s).to(kind), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Return rotary embeddings of ``[T, H, d]``; cos and sin are ``[T, d]``, of two equal halves.
    With a ``sign`` of -1, the inverse."""
    out = torch.empty_like(x)
    tokens, heads, size = x.shape
    _rotate[(tokens,)](
        x, cos, sin, out, sign, heads, size // 2, triton.next_power_of_2(heads), num_warps=4
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _swiglu(gate, up, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, of any shape."""
    out = torch.empty_like(gate)
    grid = (triton.cdiv(gate.numel(), 2048),)
    _swiglu[grid](gate, up, out, gate.numel(), 2048, num_warps=4)
    return out


@triton.jit
def _score(logits, targets, divisors, log_probs, log_sums, entropies, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    divisor = tl.load(divisors + row)
    of_row = logits + row * vocab
    largest = float("-inf")
    total = 0.0
    moment = 0.0
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        z = tl.div_rn(tl.load(of_row + token, mask=inside, other=0.0).to(tl.float32), divisor)
        larger = tl.maximum(largest, tl.max(tl.where(inside, z, float("-inf")), 0))
        p = tl.where(inside, tl.exp(z - larger), 0.0)
        factor = tl.exp(largest - larger)
        total = total * factor + tl.sum(p, 0)
        moment = moment * factor + tl.sum(p * z, 0)
        largest = larger
    log_sum = largest + tl.log(total)
    chosen = tl.load(of_row + tl.load(targets + row)).to(tl.float32)
    tl.store(log_probs + row, tl.div_rn(chosen, divisor) - log_sum)
    tl.store(log_sums + row, log_sum)
    tl.store(entropies + row, log_sum - moment / total)


def score(logits: Tensor, targets: Tensor, divisors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-prob of ``targets``, the log-sum-exp and the entropy, float32 ``[r]``, of
    ``logits / divisors``, of which logits are ``[r, vocab]``."""
    rows, vocab = logits.shape
    found = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _score[(rows,)](logits, targets, divisors, *found, vocab, 4096, num_warps=8)
    return found[0], found[1], found[2]
