"""How Hugging Face tensors become one Megatron parameter, and how that is cut into ranks.

A :class:`Layout` joins tensors of the checkpoint into a *full* array and splits it again; both only move numbers,
so a round trip is exact. ``axis`` is the dimension of the full array that tensor parallel ranks share out; a rank's
slice, reshaped, is its parameter. :meth:`Layout.part` reads that slice alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """A tensor, or one in a file of which an index reads a part."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: EllipsisType | tuple[slice, ...], /) -> Tensor: ...


@dataclass(frozen=True)
class Layout:
    """One tensor, equal on all tensor-parallel ranks (``axis`` None) or cut along ``axis``."""

    axis: int | None = None

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The full array of the checkpoint's tensors."""
        (tensor,) = tensors
        return tensor

    def split(self, full: Tensor) -> list[Tensor]:
        """The inverse of :meth:`join`."""
        return [full]

    def part(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        """``join(sources).chunk(size, axis)[rank]``, for which nothing else of ``sources`` is read.

        Raises:
            ValueError: the axis cannot be cut into ``size`` equal parts.
        """
        if self.axis is None or size == 1:
            return self.join([source[...] for source in sources])
        return self._part(sources, self.axis, rank, size)

    def _part(self, sources: Sequence[Source], axis: int, rank: int, size: int) -> Tensor:
        (source,) = sources
        length = _share(source.shape[axis], size)
        return source[(*(slice(None),) * axis, slice(rank * length, (rank + 1) * length))]

    def full_shape(self, local: Sequence[int], tp: int) -> list[int]:
        """Shape of the full array, given that of a rank's parameter."""
        shape = list(local)
        if self.axis is not None:
            shape[self.axis] *= tp
        return shape


def _share(length: int, size: int) -> int:
    if length % size:
        raise ValueError(f"{length} cannot be cut into {size} tensor parallel parts")
    return length // size


REPLICATED = Layout()
ROWS = Layout(axis=0)
"""Output features are shared out (Megatron's ColumnParallelLinear)."""
COLUMNS = Layout(axis=1)
"""Input features are shared out (Megatron's RowParallelLinear)."""


class _Rows(Layout):
    """Whole rows of the checkpoint's tensors in another order. :meth:`join` itself says which: it is applied to the
    numbers of the rows, and what it makes of them is read."""

    def _part(self, sources: Sequence[Source], axis: int, rank: int, size: int) -> Tensor:
        numbers, starts, end = [], [], 1  # 0 is a row of zeros
        for source in sources:
            numbers.append(torch.arange(end, end + source.shape[0]))
            starts.append(end)
            end += source.shape[0] + 1  # a gap, so that no run of numbers leaves its tensor
        full = self.join(numbers)
        length = _share(full.shape[axis], size)
        wanted = full.narrow(axis, rank * length, length)
        parts = []
        for first, count in _runs(wanted.flatten()):
            if first == 0:
                parts.append(sources[0][(slice(0, 0),)].new_zeros(count, *sources[0].shape[1:]))
                continue
            index = max(i for i, start in enumerate(starts) if start <= first)
            row = first - starts[index]
            parts.append(sources[index][(slice(row, row + count),)])
        return torch.cat(parts).unflatten(0, wanted.shape)


def _runs(numbers: Tensor) -> Iterator[tuple[int, int]]:
    """Consecutive numbers, and zeros in a row, as the first of them and their count."""
    goes_on = (numbers.diff() == 1) & (numbers[:-1] > 0) | (numbers[1:] == 0) & (numbers[:-1] == 0)
    ends = [*(torch.nonzero(~goes_on).flatten() + 1).tolist(), len(numbers)]
    start = 0
    for end in ends:
        yield int(numbers[start]), end - start
        start = end


@dataclass(frozen=True)
class Vocabulary(_Rows):
    """Embedding rows; behind the vocabulary Megatron has padding, which stays 0."""

    axis: int | None = 0
    rows: int = 0
    padded: int = 0

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        if tensor.shape[0] != self.rows:
            raise ValueError(f"an embedding has {tensor.shape[0]} rows, the vocabulary {self.rows}")
        return torch.cat([tensor, tensor.new_zeros(self.padded - self.rows, *tensor.shape[1:])])

    def split(self, full: Tensor) -> list[Tensor]:
        return [full[: self.rows]]


@dataclass(frozen=True)
class Stacked(_Rows):
    """Equally large tensors side by side, ``[n, rows, ...]``: gate and up projection. Each rank has rows of all."""

    axis: int | None = 1
    count: int = 2
    fused: bool = False
    """The checkpoint has them as one tensor already, one below the other."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].unflatten(0, (self.count, -1)) if self.fused else torch.stack(list(tensors))

    def split(self, full: Tensor) -> list[Tensor]:
        return [full.flatten(0, 1)] if self.fused else list(full.unbind(0))

    def full_shape(self, local: Sequence[int], tp: int) -> list[int]:
        stacked = local if len(local) == 3 else [self.count, local[0] // self.count, *local[1:]]
        return [self.count, stacked[1] * tp, *stacked[2:]]


@dataclass(frozen=True)
class QueryKeyValue(_Rows):
    """Attention projections by key-value group: for each group its query heads, its key and its value head.

    ``[groups * (heads per group + 2) * dim, ...]``; with more ranks than groups a rank's rows are part of a group.
    """

    axis: int | None = 0
    groups: int = 1
    heads_per_group: int = 1
    dim: int = 1

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([x.unflatten(0, (self.groups, -1)) for x in tensors], dim=1).flatten(0, 1)

    def split(self, full: Tensor) -> list[Tensor]:
        sizes = [self.heads_per_group * self.dim, self.dim, self.dim]
        return [x.flatten(0, 1) for x in full.unflatten(0, (self.groups, -1)).split(sizes, dim=1)]
