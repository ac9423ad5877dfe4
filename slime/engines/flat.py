"""Named tensors that travel together, and their layout in one flat buffer of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NamedTensor = tuple[str, "torch.Tensor"]
ALIGNMENT = 64  # bytes: any dtype may start there, and copies run at full speed


@dataclass
class Bucket:
    """Some tensors that travel together. The sender keeps them alive until the engine has answered.

    ``flat`` is set when all tensors are views into one uint8 buffer: it can be handed over as a whole.
    """

    index: int
    tensors: list[NamedTensor]
    last: bool = False
    flat: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors)


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
            raise ValueError(f"tensor {self.name}: torch has no dtype {self.dtype!r}")
        return dtype

    def size_of_values(self) -> int:
        """Bytes that a tensor of this shape and dtype takes."""
        return math.prod(self.shape) * self.torch_dtype().itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        dtype = self.torch_dtype()
        return flat[self.offset : self.offset + self.nbytes].view(dtype).view(self.shape)


def layout(tensors: Sequence[NamedTensor], alignment: int = ALIGNMENT) -> tuple[list[Entry], int]:
    """Where each tensor lies in a flat buffer, and the buffer's size in bytes.

    Args:
        alignment: bytes that the place of each tensor is a multiple of. With 1 there are no gaps; then tensors must
            come in descending order of their element sizes (:func:`by_element_size`).
    """
    entries, end = [], 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, nbytes))
        end += -(-nbytes // alignment) * alignment
    return entries, end


def by_element_size(tensors: Sequence[NamedTensor]) -> list[NamedTensor]:
    """Largest elements first, so that tensors which lie end to end without gaps start at a multiple of their element
    size; otherwise in the order given."""
    return sorted(tensors, key=lambda pair: -pair[1].element_size())


def flatten(
    tensors: Sequence[NamedTensor], entries: Sequence[Entry], size: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy tensors into one flat uint8 buffer on their device: into ``out``, or a new one whose gaps are zero."""
    import torch

    flat = torch.zeros(size, dtype=torch.uint8, device=tensors[0][1].device) if out is None else out[:size]
    views = [entry.view(flat) for entry in entries]
    torch._foreach_copy_(views, [tensor.detach() for _, tensor in tensors])
    return flat
