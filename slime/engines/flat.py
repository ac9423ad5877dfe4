"""Tensors end to end in one buffer of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from slime.weights.update import NamedTensor

ALIGNMENT = 64  # bytes: any dtype may start there, and copies run at full speed


@dataclass(frozen=True)
class Entry:
    """One tensor in the flat buffer of its bucket."""

    name: str
    dtype: str  # "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int

    def torch_dtype(self) -> torch.dtype:
        """Raises :class:`ValueError` for a name that is no dtype."""
        import torch

        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.name}: torch has no dtype {self.dtype!r}")
        return dtype

    def size_of_values(self) -> int:
        """Bytes that a tensor of this shape and dtype takes."""
        return math.prod(self.shape) * self.torch_dtype().itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        dtype = self.torch_dtype()
        return flat[self.offset : self.offset + self.nbytes].view(dtype).view(self.shape)


def layout(tensors: Sequence[NamedTensor]) -> tuple[list[Entry], int]:
    """Where each tensor lies in a flat buffer, and the buffer's size in bytes."""
    entries, end = [], 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, nbytes))
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return entries, end


def flatten(
    tensors: Sequence[NamedTensor], entries: Sequence[Entry], size: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy tensors into one flat uint8 buffer on their device: into ``out``, or a new one whose gaps are zero."""
    import torch

    flat = torch.zeros(size, dtype=torch.uint8, device=tensors[0][1].device) if out is None else out[:size]
    views = [entry.view(flat) for entry in entries]
    torch._foreach_copy_(views, [tensor.detach() for _, tensor in tensors])
    return flat
