"""Buckets of named tensors that are sent together, and their layout in one flat buffer of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NamedTensor = tuple[str, "torch.Tensor"]
ALIGNMENT = 64  # bytes; enough for any dtype, and copies run at full speed


@dataclass
class Bucket:
    """Tensors that are sent together. The sender keeps them alive until the engine has answered.

    Attributes:
        index: The number of the bucket in its update.
        last: Whether this is the last bucket of the update.
        flat: The uint8 buffer into which all tensors are views, so that it can be sent as a whole. None if the
            tensors do not share a buffer.
        adapter: Whether these are all factors of an adapter (LoRA) for engines that load adapters by name, and no
            weights of the model.
    """

    index: int
    tensors: list[NamedTensor]
    last: bool = False
    flat: torch.Tensor | None = None
    adapter: bool = False

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors)


@dataclass(frozen=True)
class Entry:
    """The place of one tensor in the flat buffer of its bucket."""

    name: str
    dtype: str  # without the prefix "torch.", for example "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int

    def torch_dtype(self) -> torch.dtype:
        """Return the dtype. Raises :class:`ValueError` if torch has no dtype of this name."""
        import torch

        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"tensor {self.name}: torch has no dtype {self.dtype!r}")
        return dtype

    def size_of_values(self) -> int:
        """Return the size in bytes that follows from shape and dtype; ``nbytes`` may come from another process."""
        return math.prod(self.shape) * self.torch_dtype().itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        dtype = self.torch_dtype()
        return flat[self.offset : self.offset + self.nbytes].view(dtype).view(self.shape)


def layout(tensors: Sequence[NamedTensor], alignment: int = ALIGNMENT) -> tuple[list[Entry], int]:
    """Compute the place of each tensor in a flat buffer, and the size of the buffer in bytes.

    Args:
        alignment: Each tensor starts at a multiple of this number of bytes. With 1 there are no gaps between tensors.
            The tensors must then be sorted by :func:`by_element_size`, because a view needs a start that is a multiple
            of its element size.
    """
    entries, end = [], 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, nbytes))
        end += -(-nbytes // alignment) * alignment
    return entries, end


def by_element_size(tensors: Sequence[NamedTensor]) -> list[NamedTensor]:
    """Sort tensors by element size, largest first, and keep the given order among equal sizes.

    In this order every tensor of a buffer without gaps starts at a multiple of its element size.
    """
    return sorted(tensors, key=lambda pair: -pair[1].element_size())


def flatten(
    tensors: Sequence[NamedTensor], entries: Sequence[Entry], size: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy tensors into one flat uint8 buffer on their device: into ``out``, or into a new buffer with zeroed gaps."""
    import torch

    flat = torch.zeros(size, dtype=torch.uint8, device=tensors[0][1].device) if out is None else out[:size]
    views = [entry.view(flat) for entry in entries]
    torch._foreach_copy_(views, [tensor.detach() for _, tensor in tensors])
    return flat
