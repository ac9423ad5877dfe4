"""Tensors end to end in one buffer of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from slime.weights.update import NamedTensor

_ALIGNMENT = 64  # bytes: any dtype may start there, and copies run at full speed


@dataclass(frozen=True)
class Entry:
    """One tensor in the flat buffer of its bucket."""

    name: str
    dtype: str  # "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return flat[self.offset : self.offset + self.nbytes].view(dtype).view(self.shape)


def layout(tensors: Sequence[NamedTensor]) -> tuple[list[Entry], int]:
    """Where each tensor lies in a flat buffer, and the buffer's size in bytes."""
    entries, end = [], 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, nbytes))
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
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
