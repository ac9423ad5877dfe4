"""Maps between Hugging Face and Megatron weights, for loading, weight sync and export. Here: how
Hugging Face tensors are joined to one Megatron parameter, and how it is divided among tensor-parallel
ranks.

A :class:`Layout` joins tensors of the checkpoint to a *full* array and splits this array again.
Both operations only move values, so a round trip is exact. ``axis`` is the dimension of the full
array that is divided among tensor-parallel ranks. The slice of a rank, reshaped, is its parameter.
:meth:`Layout.part` reads only this slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """A tensor, or a tensor in a file, of which indexing reads only a part."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: EllipsisType | tuple[slice, ...], /) -> Tensor: ...


@dataclass(frozen=True)
class Layout:
    """The layout of one tensor that is equal on all tensor-parallel ranks (``axis`` None) or
    divided along ``axis``.
    """

    axis: int | None = None

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Join the tensors of the checkpoint to the full array."""
        (tensor,) = tensors
        return tensor

    def split(self, full: Tensor) -> list[Tensor]:
        """Split a full array into the tensors of the checkpoint, the inverse of :meth:`join`."""
        return [full]

    def part(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        """Return ``join(sources).chunk(size, axis)[rank]``, but read only this part of ``sources``.

        Raises:
            ValueError: The axis cannot be divided into ``size`` equal parts.
        """
        if self.axis is None or size == 1:
            return self.join([source[...] for source in sources])
        return self._part(sources, self.axis, rank, size)

    def _part(self, sources: Sequence[Source], axis: int, rank: int, size: int) -> Tensor:
        (source,) = sources
        length = _share(source.shape[axis], size)
        return source[(*(slice(None),) * axis, slice(rank * length, (rank + 1) * length))]

    def full_shape(self, local: Sequence[int], tp: int) -> list[int]:
        """Return the shape of the full array, given the shape of a rank's parameter."""
        shape = list(local)
        if self.axis is not None:
            shape[self.axis] *= tp
        return shape


def _share(length: int, size: int) -> int:
    if length % size:
        raise ValueError(f"{length} cannot be divided into {size} tensor parallel parts")
    return length // size


REPLICATED = Layout()
ROWS = Layout(axis=0)
"""Output features are divided among ranks (Megatron's ColumnParallelLinear)."""
COLUMNS = Layout(axis=1)
"""Input features are divided among ranks (Megatron's RowParallelLinear)."""


class _Rows(Layout):
    """A layout that only changes the order of whole rows of the checkpoint's tensors.

    To find the order, :meth:`join` is applied to the numbers of the rows. Then only the rows of a
    rank are read.
    """

    def _part(self, sources: Sequence[Source], axis: int, rank: int, size: int) -> Tensor:
        # the number 0 stands for a row of zeros, which join() adds as padding
        numbers = []
        starts = []
        end = 1
        for source in sources:
            numbers.append(torch.arange(end, end + source.shape[0]))
            starts.append(end)
            # a gap between tensors, so that no run of numbers continues in the next one
            end += source.shape[0] + 1
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
    """Yield runs of consecutive numbers and runs of zeros, each as its first number and its
    length.
    """
    goes_on = (numbers.diff() == 1) & (numbers[:-1] > 0) | (numbers[1:] == 0) & (numbers[:-1] == 0)
    ends = [*(torch.nonzero(~goes_on).flatten() + 1).tolist(), len(numbers)]
    start = 0
    for end in ends:
        yield int(numbers[start]), end - start
        start = end


@dataclass(frozen=True)
class Vocabulary(_Rows):
    """The layout of embeddings. After the rows of the vocabulary, Megatron has padding rows, which
    stay 0.
    """

    axis: int | None = 0
    rows: int = 0
    padded: int = 0

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        if tensor.shape[0] != self.rows:
            raise ValueError(
                f"an embedding has {tensor.shape[0]} rows, but the vocabulary has {self.rows} "
                "tokens"
            )
        return torch.cat([tensor, tensor.new_zeros(self.padded - self.rows, *tensor.shape[1:])])

    def split(self, full: Tensor) -> list[Tensor]:
        return [full[: self.rows]]


@dataclass(frozen=True)
class Stacked(_Rows):
    """The layout of tensors of equal size, ``[n, rows, ...]``: gate and up projection. Each rank
    has rows of all.
    """

    axis: int | None = 1
    count: int = 2
    fused: bool = False
    """Whether the checkpoint has one tensor in which they are concatenated."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return (
            tensors[0].unflatten(0, (self.count, -1)) if self.fused else torch.stack(list(tensors))
        )

    def split(self, full: Tensor) -> list[Tensor]:
        return [full.flatten(0, 1)] if self.fused else list(full.unbind(0))

    def full_shape(self, local: Sequence[int], tp: int) -> list[int]:
        stacked = local if len(local) == 3 else [self.count, local[0] // self.count, *local[1:]]
        return [self.count, stacked[1] * tp, *stacked[2:]]


class _OfExpert(Layout):
    """The layout of one expert's part of a tensor that has all experts. The caller has read this
    part already.
    """

    def _part(self, sources: Sequence[Source], axis: int, rank: int, size: int) -> Tensor:
        full = self.join([source[...] for source in sources])
        length = _share(full.shape[axis], size)
        return full.narrow(axis, rank * length, length)


@dataclass(frozen=True)
class Interleaved(_OfExpert):
    """Gate and up projection ``[H, 2 f]``, or their biases ``[2 f]``, with gate and up in turn
    (gpt-oss). The full array is ``[2, f, H]`` or ``[2, f]``."""

    axis: int | None = 1

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        return _reversed(tensor.unflatten(-1, (-1, 2)))

    def split(self, full: Tensor) -> list[Tensor]:
        return [_reversed(full).flatten(-2)]


@dataclass(frozen=True)
class Transposed(_OfExpert):
    """A matrix ``[in, out]``. The full array is ``[out, in]``, and its input features are divided
    among ranks.
    """

    axis: int | None = 1

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        return tensor.t()

    def split(self, full: Tensor) -> list[Tensor]:
        return [full.t()]


@dataclass(frozen=True)
class ByHead(_Rows):
    """The layout of one tensor of the checkpoint that has the rows of all queries, then of all
    keys, and so on.

    The full array has the heads one after the other: of each head its query, its key, and so on,
    with ``sizes`` rows.
    """

    axis: int | None = 0
    heads: int = 1
    sizes: tuple[int, ...] = ()

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        parts = tensor.split([self.heads * size for size in self.sizes])
        return torch.cat([part.unflatten(0, (self.heads, -1)) for part in parts], dim=1).flatten(
            0, 1
        )

    def split(self, full: Tensor) -> list[Tensor]:
        parts = full.unflatten(0, (self.heads, -1)).split(self.sizes, dim=1)
        return [torch.cat([part.flatten(0, 1) for part in parts])]


def _reversed(x: Tensor) -> Tensor:
    return x.permute(*reversed(range(x.dim())))


@dataclass(frozen=True)
class GatedQuery(_Rows):
    """The layout of gated queries. Each head in the checkpoint is a query and its gate, ``2 * dim``
    rows. The full array has the queries of each group, then its gates."""

    axis: int | None = 0
    groups: int = 1
    heads_per_group: int = 1
    dim: int = 1

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        return (
            tensor.unflatten(0, (self.groups, self.heads_per_group, 2, self.dim))
            .transpose(1, 2)
            .flatten(0, 3)
        )

    def split(self, full: Tensor) -> list[Tensor]:
        return [
            full.unflatten(0, (self.groups, 2, self.heads_per_group, self.dim))
            .transpose(1, 2)
            .flatten(0, 3)
        ]


@dataclass(frozen=True)
class QueryKeyValue(_Rows):
    """The layout of attention projections: for each key-value group its query heads, its key head
    and its value head.

    The full array is ``[groups * (heads per group + 2) * dim, ...]``. With more ranks than groups,
    a rank has a part of a group. If queries are ``gated``, their layout is :class:`GatedQuery`.
    """

    axis: int | None = 0
    groups: int = 1
    heads_per_group: int = 1
    dim: int = 1
    gated: bool = False
    fused: bool = False
    """Whether the checkpoint has one tensor in which they are concatenated."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        if self.fused:
            tensors = tensors[0].split([self.groups * size for size in self.sizes])
        query, *key_value = tensors
        parts = [self.query.join([query]), *key_value]
        return torch.cat([x.unflatten(0, (self.groups, -1)) for x in parts], dim=1).flatten(0, 1)

    def split(self, full: Tensor) -> list[Tensor]:
        query, *key_value = (
            x.flatten(0, 1) for x in full.unflatten(0, (self.groups, -1)).split(self.sizes, dim=1)
        )
        parts = [*self.query.split(query), *key_value]
        return [torch.cat(parts)] if self.fused else parts

    @property
    def query(self) -> Layout:
        """The layout of the queries alone."""
        return GatedQuery(0, self.groups, self.heads_per_group, self.dim) if self.gated else ROWS

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows of queries, key and value in a group."""
        return [self.heads_per_group * self.dim * (2 if self.gated else 1), self.dim, self.dim]
