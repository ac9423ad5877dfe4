"""The formats of quantized weights: how values are computed from what is stored, and stored again.

A function that reads a format stands before its inverse. In the inverse, each scale is the one of
two with the smaller squared error over its block: the scale that the checkpoint stores there, or a
new one for the largest value of the block. So a weight that has not changed gets the bytes of the
checkpoint back, and one that has changed little stays on its grid. The stored scale may clip a
value that a new scale would hold, if the other values of the block lose less with it. Trainers may
have rounded the weight to bfloat16: an error that this explains does not count against the stored
scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.models.quantized import EXPONENTS, factors_of

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of 4-bit floats by their codes."""
_BFLOAT16 = 2.0**-16
"""The largest squared relative error of a value in bfloat16, which has 8 significant bits."""


def to_scaled(
    weight: Tensor, stored: Tensor, dtype: torch.dtype, sizes: tuple[int, ...] | None
) -> tuple[Tensor, Tensor]:
    """Return 8-bit values and scales, the inverse of :func:`slime.models.quantized.scaled`.

    Args:
        weight: ``[..., R, C]``.
        stored: The scales of the checkpoint, whose shape and dtype the new ones have.
        dtype: Of the values: an 8-bit float, or int8.
        sizes: Block length along each axis; None for a single scale.
    """
    sizes = tuple(weight.shape) if sizes is None else sizes
    blocks = _blocks(weight.float(), sizes)  # [counts..., elements of a block]
    old = factors_of(stored).reshape(blocks.shape[:-1])
    largest = _largest(dtype)
    new = _as_stored(blocks.abs().amax(-1) / largest, stored.dtype)
    choices = [(_round(blocks, factors, dtype), factors) for factors in (old, factors_of(new))]
    errors = [((q.float() * f.unsqueeze(-1)) - blocks).square().sum(-1) for q, f in choices]
    keep = _usable(old) & _keeps(blocks, errors[0], errors[1])
    values = torch.where(keep.unsqueeze(-1), choices[0][0].float(), choices[1][0].float()).to(dtype)
    scales = torch.where(
        keep.reshape(stored.shape), _bits(stored), _bits(new.reshape(stored.shape))
    )
    return _unblocked(values, weight.shape, sizes), scales.view(stored.dtype)


def unpacked(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Unpack signed integers of ``bits`` bits: int32 ``[R, ceil(columns * bits / 32)]`` -> int8
    ``[R, columns]``.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return (values.flatten(1)[:, :columns] - 2 ** (bits - 1)).to(torch.int8)


def to_packed(weight: Tensor, stored: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return packed integers, int32 ``[R, ceil(C * bits / 32)]``, and scales ``[R, groups]``
    (compressed-tensors).

    A new scale is the largest value over half the range of the integers, as compressed-tensors 0.18
    computes it.
    """
    groups = weight.float().unflatten(1, (stored.shape[1], -1))
    half = 2 ** (bits - 1)
    new = (groups.abs().amax(-1) / (half - 0.5)).to(stored.dtype)
    best: list[Tensor] = []
    for factors in (stored.float(), new.float()):
        q = (groups / _divisor(factors).unsqueeze(-1)).round().clamp(-half, half - 1)
        best += [q, (q * factors.unsqueeze(-1) - groups).square().sum(-1)]
    keep = _usable(stored.float()) & _keeps(groups, best[1], best[3])
    values = torch.where(keep.unsqueeze(-1), best[0], best[2]).flatten(1).to(torch.int64) + half
    per_word = 32 // bits
    words = F.pad(values, (0, -values.shape[1] % per_word)).unflatten(1, (-1, per_word))
    packed = (words << torch.arange(0, 32, bits)).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return packed, torch.where(keep, stored, new)


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize one expert exactly: uint8 ``[R, G, 16]``, exponents uint8 ``[R, G]`` -> bfloat16
    ``[G * 32, R]``.
    """
    table = torch.tensor(E2M1, dtype=torch.bfloat16)
    values = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], -1).flatten(2)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - 127).flatten(1).t().contiguous()


def to_mxfp4(weight: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return two 4-bit floats a byte, uint8 ``[R, G, 16]``, and exponents, uint8 ``[R, G]``, of one
    expert.

    A new exponent is that of OCP Microscaling Formats 1.0: of the largest value, less the largest
    exponent of E2M1.

    Args:
        weight: ``[G * 32, R]``.
        stored: The exponents of the checkpoint.
    """
    groups = weight.float().t().unflatten(1, (-1, 32))  # [R, G, 32]
    largest = groups.abs().amax(-1)
    exponents = torch.frexp(largest).exponent - 1  # floor(log2), exact
    new = (exponents - 2 + 127).clamp(0, 254).to(torch.uint8)
    new = torch.where(largest > 0, new, stored)
    results = []
    for scales in (stored, new):
        factors = torch.exp2(scales.float() - 127.0).unsqueeze(-1)
        codes = nearest_e2m1(groups / factors)
        table = torch.tensor(E2M1)
        results.append((codes, (table[codes.long()] * factors - groups).square().sum(-1)))
    keep = results[0][1] <= results[1][1]
    codes = torch.where(keep.unsqueeze(-1), results[0][0], results[1][0])
    return codes[..., 0::2] | (codes[..., 1::2] << 4), torch.where(keep, stored, new)


def nearest_e2m1(values: Tensor) -> Tensor:
    """Return the codes of the nearest 4-bit floats, of two equally near ones the even one; too
    large ones saturate.
    """
    bounds = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1[:8])])
    size = values.abs().contiguous()
    codes = torch.bucketize(size, bounds)  # a value on a bound belongs to the smaller one ...
    on_bound = (
        (codes < len(bounds))
        & (codes % 2 == 1)
        & (size == bounds[codes.clamp(max=len(bounds) - 1)])
    )
    codes = codes + on_bound.to(codes.dtype)  # ... unless its code is odd
    return (codes + 8 * torch.signbit(values)).to(torch.uint8)


def _largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def _round(blocks: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    values = blocks / _divisor(factors).unsqueeze(-1)
    bound = _largest(dtype)
    if dtype == torch.int8:
        values = values.round().clamp(-128, 127)
    return values.clamp(-128.0 if dtype == torch.int8 else -bound, bound).to(dtype)


def _keeps(blocks: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Return whether blocks ``[..., elements]`` keep the stored scale, given the squared errors of
    it and a new one.
    """
    return old <= torch.maximum(new, blocks.square().sum(-1) * _BFLOAT16)


def _usable(factors: Tensor) -> Tensor:
    return torch.isfinite(factors) & (factors != 0)


def _divisor(factors: Tensor) -> Tensor:
    """Without zeros and infinities: of a block of zeros, and where :func:`_usable` is false."""
    return torch.where(_usable(factors), factors, torch.ones_like(factors))


def _as_stored(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales in the checkpoint's dtype. Exponents are rounded up, so that no value is
    too large.
    """
    if dtype not in EXPONENTS:
        return factors.to(dtype)
    mantissa, exponent = torch.frexp(factors)
    power = (exponent - (mantissa == 0.5).to(exponent.dtype) + 127).clamp(0, 254).to(torch.uint8)
    return power if dtype == torch.uint8 else power.view(dtype)


def _bits(scales: Tensor) -> Tensor:
    """The same bytes in a dtype that ``torch.where`` has."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales


def _blocks(weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """``[d0, d1, ...]`` -> ``[n0, n1, ..., elements]``, with zeros where the last block of an axis
    is shorter.
    """
    padding = [
        p
        for size, length in zip(sizes[::-1], weight.shape[::-1], strict=True)
        for p in (0, -length % size)
    ]
    padded = F.pad(weight, padding)
    counts = [length // size for size, length in zip(sizes, padded.shape, strict=True)]
    parts = padded.reshape([n for pair in zip(counts, sizes, strict=True) for n in pair])
    axes = [*range(0, 2 * len(sizes), 2), *range(1, 2 * len(sizes), 2)]
    return parts.permute(axes).reshape(*counts, math.prod(sizes))


def _unblocked(blocks: Tensor, shape: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The inverse of :func:`_blocks`."""
    counts = blocks.shape[:-1]
    parts = blocks.reshape(*counts, *sizes)
    axes = [axis for i in range(len(sizes)) for axis in (i, i + len(sizes))]
    whole = parts.permute(axes).reshape([n * size for n, size in zip(counts, sizes, strict=True)])
    return whole[tuple(slice(0, n) for n in shape)].contiguous()
