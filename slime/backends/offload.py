"""Give accelerator memory back between training phases, and take it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from slime.backends.collectives import local

ARENA_BYTES = 2**30


class Offloader:
    """Moves the bytes behind tensors to pinned CPU memory and back, in place.

    It frees each storage and later gives it its size again, so every alias (FSDP's views of its shards,
    the optimizer's references) stays what it was. The pinned memory is kept: pinning costs far more than the
    copy. It comes in pieces of a power of two, for torch rounds what it pins up to one.
    """

    def __init__(self) -> None:
        self._asleep: list[tuple[torch.UntypedStorage, int]] = []
        self._host = HostArena()

    @property
    def asleep(self) -> bool:
        return bool(self._asleep)

    @torch.no_grad()
    def sleep(self, tensors: Iterable[Tensor]) -> int:
        """Returns the bytes given back; 0 on the CPU, and when everything sleeps already."""
        storages = {}
        for tensor in tensors:
            part = local(tensor)
            if part.is_cuda and part.untyped_storage().nbytes():
                storages[part.untyped_storage().data_ptr()] = part.untyped_storage()
        if not storages:
            return 0
        assert not self._asleep, "sleep() twice without wake()"
        self._host.reserve(sum(storage.nbytes() for storage in storages.values()))
        offset = 0
        for storage in storages.values():
            device = _bytes(storage)
            for host, part in self._host.pieces(offset, device):
                host.copy_(part, non_blocking=True)
            self._asleep.append((storage, device.numel()))
            offset += device.numel()
        torch.cuda.synchronize()
        for storage, _ in self._asleep:
            storage.resize_(0)
        torch.cuda.empty_cache()
        return offset

    @torch.no_grad()
    def wake(self) -> None:
        offset = 0
        for storage, nbytes in self._asleep:
            storage.resize_(nbytes)
            for host, part in self._host.pieces(offset, _bytes(storage)):
                part.copy_(host, non_blocking=True)
            offset += nbytes
        if self._asleep:
            torch.cuda.synchronize()
        self._asleep.clear()


class HostArena:
    """Pinned CPU memory as one row of bytes, made of pieces of a power of two."""

    def __init__(self, piece_bytes: int = ARENA_BYTES, pinned: bool = True) -> None:
        self.piece_bytes, self.pinned = piece_bytes, pinned
        self.memory: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(piece.numel() for piece in self.memory)

    def reserve(self, nbytes: int) -> None:
        """Have room for ``nbytes``; never shrinks. What is left over after whole pieces gets a smaller one."""
        if self.memory and self.memory[-1].numel() < self.piece_bytes and nbytes > self.nbytes:
            self.memory.pop()  # only the last piece may be small
        while (missing := nbytes - self.nbytes) > 0:
            size = min(1 << (missing - 1).bit_length(), self.piece_bytes)
            self.memory.append(torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned))

    def pieces(self, offset: int, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Cut ``flat`` (uint8) where the pieces end: pairs of host memory from ``offset`` on and its part."""
        done = 0
        while done < flat.numel():
            index, start = divmod(offset + done, self.piece_bytes)
            count = min(self.memory[index].numel() - start, flat.numel() - done)
            yield self.memory[index][start : start + count], flat[done : done + count]
            done += count


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
