"""Give accelerator memory back between training phases, and take it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from slime.backends.collectives import local

ARENA_BYTES = 2**30
ALIGNMENT = 64


class Offloader:
    """Moves the bytes behind tensors to pinned CPU memory and back, in place.

    It frees each storage and later gives it its size again, so every alias (FSDP's views of its shards,
    the optimizer's references) stays what it was. The pinned memory is kept: pinning costs far more than the
    copy. It comes in pieces of a power of two, for torch rounds what it pins up to one. Others may use
    :attr:`host` for a while, behind what sleeps.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        self._asleep: list[tuple[torch.UntypedStorage, int]] = []
        self._device_type = device_type
        self.host = HostArena(pinned=device_type == "cuda")

    @property
    def asleep(self) -> bool:
        return bool(self._asleep)

    @torch.no_grad()
    def sleep(self, tensors: Iterable[Tensor], keep: Iterable[Tensor] = ()) -> int:
        """Returns the bytes given back; 0 on the CPU, and when everything sleeps already.

        Args:
            keep: tensors that stay, with all that shares their memory, until a later call puts them to sleep as well;
                there is room for them then.
        """
        staying = self._storages(keep)
        storages = {place: x for place, x in self._storages(tensors).items() if place not in staying}
        if not storages:
            return 0
        start = offset = sum(nbytes for _, nbytes in self._asleep)
        self.host.reserve(start + sum(x.nbytes() for x in [*storages.values(), *staying.values()]))
        for storage in storages.values():
            flat = _bytes(storage)
            for host, part in self.host.pieces(offset, flat):
                host.copy_(part, non_blocking=True)
            self._asleep.append((storage, flat.numel()))
            offset += flat.numel()
        self._synchronize()
        # Only now: the copies above are asynchronous and read this memory until the synchronisation.
        for storage in storages.values():
            storage.resize_(0)
        self.host.held = offset
        return offset - start

    def _storages(self, tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
        """What is awake on the accelerator, by address."""
        storages = {}
        for tensor in tensors:
            part = local(tensor)
            if part.device.type == self._device_type and part.untyped_storage().nbytes():
                storages[part.untyped_storage().data_ptr()] = part.untyped_storage()
        return storages

    def _synchronize(self) -> None:
        if self._device_type == "cuda":
            torch.cuda.synchronize()

    @torch.no_grad()
    def wake(self) -> None:
        offset = 0
        for storage, nbytes in self._asleep:
            storage.resize_(nbytes)
            for host, part in self.host.pieces(offset, _bytes(storage)):
                part.copy_(host, non_blocking=True)
            offset += nbytes
        if self._asleep:
            self._synchronize()
        self._asleep.clear()
        self.host.held = 0


class HostArena:
    """Pinned CPU memory as one row of bytes, made of pieces of a power of two."""

    def __init__(self, piece_bytes: int = ARENA_BYTES, pinned: bool = True) -> None:
        self.piece_bytes, self.pinned = piece_bytes, pinned
        self.memory: list[Tensor] = []
        self.held = 0
        """Bytes at the beginning that are someone's; others take what lies behind them."""

    @property
    def nbytes(self) -> int:
        return sum(piece.numel() for piece in self.memory)

    def reserve(self, nbytes: int) -> None:
        """Have room for ``nbytes``; never shrinks, and keeps what it holds. What is left over after whole pieces gets a
        smaller one."""
        small = None
        if self.memory and self.memory[-1].numel() < self.piece_bytes and nbytes > self.nbytes:
            small = self.memory.pop()  # only the last piece may be small
        while (missing := nbytes - self.nbytes) > 0:
            size = min(1 << (missing - 1).bit_length(), self.piece_bytes)
            self.memory.append(torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned))
            if small is not None:
                self.memory[-1][: small.numel()] = small
                small = None

    def pieces(self, offset: int, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Cut ``flat`` (uint8) where the pieces end: pairs of host memory from ``offset`` on and its part."""
        done = 0
        while done < flat.numel():
            index, start = divmod(offset + done, self.piece_bytes)
            count = min(self.memory[index].numel() - start, flat.numel() - done)
            yield self.memory[index][start : start + count], flat[done : done + count]
            done += count


def host_tensors(like: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Uninitialised CPU tensors of these shapes, pinned where ``like`` is on CUDA.

    Many share one piece of memory of a power of two: torch rounds what it pins up to one, so tensors that are pinned
    one by one take up to twice their size.

    Args:
        dtype: of those whose dtype is a floating-point one; None for their own.
    """
    kinds = [dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype for tensor in like]
    needs = [-(-t.numel() * kind.itemsize // ALIGNMENT) * ALIGNMENT for t, kind in zip(like, kinds, strict=True)]
    piece, used, rest, out = torch.empty(0, dtype=torch.uint8), 0, sum(needs), []
    for tensor, kind, need in zip(like, kinds, needs, strict=True):
        if used + need > piece.numel():
            pinned = tensor.is_cuda
            size = max(need, min(1 << (rest - 1).bit_length() if pinned else rest, ARENA_BYTES))
            piece, used = torch.empty(size, dtype=torch.uint8, pin_memory=pinned), 0
        out.append(piece[used : used + tensor.numel() * kind.itemsize].view(kind).view(tensor.shape))
        used, rest = used + need, rest - need
    return out


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
