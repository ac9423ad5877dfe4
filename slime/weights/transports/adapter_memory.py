"""Shared memory for the versions of an adapter, which is used again when no engine reads it any more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime.engines.payload import shared_memory
from slime.weights.pinning import pin

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class _Buffer:
    flat: torch.Tensor  # uint8, on the host
    readers: set[str] = field(default_factory=set)  # the URLs of engines that may read it


class AdapterMemory:
    """Two buffers, in which the versions of an adapter alternate.

    SGLang reads a version in the memory of the trainer until it has loaded the next one. New memory for each version
    would be simpler, but its pages take longer to allocate than the factors take to copy, and CUDA copies faster to
    page-locked memory, which takes even longer to allocate.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []
        self._current: _Buffer | None = None

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """Return ``size`` bytes of shared memory that no engine reads.

        Args:
            device: The device from which the factors are copied. The memory is page-locked for a CUDA device.
        """
        free = [buffer for buffer in self._buffers if not buffer.readers and buffer.flat.numel() == size]
        if not free:  # a buffer that engines read is left to them, and is freed when they close it
            free = [_Buffer(shared_memory(size)) for _ in range(1 if self._buffers else 2)]
            for buffer in free:
                pin(buffer, device)
            newest = [] if self._current is None else [self._current]
            self._buffers = [*newest, *free]
        self._current = free[0]
        return self._current.flat

    def sent(self, engines: Iterable[str]) -> None:
        """Record which engines get the memory that was taken last. They may read it from now on."""
        assert self._current is not None, "take the memory first"
        self._current.readers |= set(engines)

    def loaded(self, engines: Iterable[str]) -> None:
        """Record which engines have loaded the version in the memory that was taken last, and read no other one."""
        for buffer in self._buffers:
            if buffer is not self._current:
                buffer.readers -= set(engines)
