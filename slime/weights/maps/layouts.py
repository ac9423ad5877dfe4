"""How Hugging Face tensors become one Megatron parameter, and how that is cut into ranks.

A :class:`Layout` joins tensors of the checkpoint into a *full* array and splits it again; both only move numbers,
so a round trip is exact. ``axis`` is the dimension of the full array that tensor parallel ranks share out; a rank's
slice, reshaped, is its parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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

    def full_shape(self, local: Sequence[int], tp: int) -> list[int]:
        """Shape of the full array, given that of a rank's parameter."""
        shape = list(local)
        if self.axis is not None:
            shape[self.axis] *= tp
        return shape


REPLICATED = Layout()
ROWS = Layout(axis=0)
"""Output features are shared out (Megatron's ColumnParallelLinear)."""
COLUMNS = Layout(axis=1)
"""Input features are shared out (Megatron's RowParallelLinear)."""


@dataclass(frozen=True)
class Vocabulary(Layout):
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
class Stacked(Layout):
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
class QueryKeyValue(Layout):
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
