"""Release accelerator memory between training phases, and take it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from slime.backends.collectives import local

ARENA_BYTES = 2**30
ALIGNMENT = 64
PINNING_THREADS = 2  # beside those that torch starts for each piece


class Offloader:
    """Moves the storages of tensors to pinned CPU memory and back, in place.

    Each storage is freed and later resized to its old size, so all aliases (FSDP's views of its
    shards, the references of the optimizer) stay valid. The pinned memory is kept, because pinning
    takes much longer than the copy. It is allocated in pieces whose size is a power of two, because
    torch rounds pinned memory up to one. Other code may use the part of :attr:`host` after the
    offloaded bytes.
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
        """Offload tensors, and return the number of released bytes: 0 on the CPU, or if all are
        offloaded already.

        Args:
            keep: Tensors that stay on the accelerator, with all tensors that share their memory. A
                later call can offload them too; memory for this is reserved.
        """
        staying = self._storages(keep)
        storages = {
            place: x for place, x in self._storages(tensors).items() if place not in staying
        }
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
        # This must come after the synchronization, because the copies above are asynchronous and
        # read this memory.
        for storage in storages.values():
            storage.resize_(0)
        self.host.held = offset
        return offset - start

    def _storages(self, tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
        """Return the storages that are on the accelerator, by address."""
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
    """Pinned CPU memory as one sequence of bytes, made of pieces whose sizes are powers of two."""

    def __init__(self, piece_bytes: int = ARENA_BYTES, pinned: bool = True) -> None:
        self.piece_bytes = piece_bytes
        self.pinned = pinned
        self.memory: list[Tensor] = []
        self.held = 0
        """The number of bytes at the beginning that are in use. Other code may use the bytes after
        them.
        """

    @property
    def nbytes(self) -> int:
        return sum(piece.numel() for piece in self.memory)

    def reserve(self, nbytes: int) -> None:
        """Make the memory at least ``nbytes`` large. It never shrinks, and its contents are kept.
        The rest after full pieces is a smaller piece."""
        # A small last piece is replaced by a full one, so that offsets stay multiples of the size
        # of a piece.
        small = None
        if self.memory and self.memory[-1].numel() < self.piece_bytes and nbytes > self.nbytes:
            small = self.memory.pop()  # only the last piece may be small
        missing = nbytes - self.nbytes
        sizes = list[int]()
        while missing > 0:
            sizes.append(min(1 << (missing - 1).bit_length(), self.piece_bytes))
            missing -= sizes[-1]
        if self.pinned and len(sizes) > 1:
            # The pages of one piece are created while another piece is registered.
            with ThreadPoolExecutor(PINNING_THREADS) as threads:
                self.memory += threads.map(self.allocate, sizes)
        else:
            self.memory += map(self.allocate, sizes)
        if small is not None:
            place = self.memory[len(self.memory) - len(sizes)]
            place[: small.numel()] = small

    def allocate(self, size: int) -> Tensor:
        """Return a new piece of host memory of ``size`` bytes."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)

    def pieces(self, offset: int, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Divide ``flat`` (uint8) at the ends of pieces. Yield pairs of host memory, from
        ``offset`` on, and a part.
        """
        done = 0
        while done < flat.numel():
            index, start = divmod(offset + done, self.piece_bytes)
            count = min(self.memory[index].numel() - start, flat.numel() - done)
            yield self.memory[index][start : start + count], flat[done : done + count]
            done += count


def host_tensors(like: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return uninitialized CPU tensors with these shapes, pinned if ``like`` is on CUDA.

    Many tensors share one piece of memory whose size is a power of two. torch rounds pinned memory
    up to a power of two, so tensors that are pinned one by one would need up to twice their size.

    Args:
        dtype: The dtype of tensors that have a floating-point dtype; None for their own.
    """
    kinds = [
        dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        for tensor in like
    ]
    needs = [
        -(-t.numel() * kind.itemsize // ALIGNMENT) * ALIGNMENT
        for t, kind in zip(like, kinds, strict=True)
    ]
    piece = torch.empty(0, dtype=torch.uint8)
    used = 0
    rest = sum(needs)
    out = []
    for tensor, kind, need in zip(like, kinds, needs, strict=True):
        if used + need > piece.numel():
            pinned = tensor.is_cuda
            size = max(need, min(1 << (rest - 1).bit_length() if pinned else rest, ARENA_BYTES))
            piece = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            used = 0
        out.append(
            piece[used : used + tensor.numel() * kind.itemsize].view(kind).view(tensor.shape)
        )
        used = used + need
        rest = rest - need
    return out


@contextmanager
def copied_to(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Move a model on the CPU to a device, and cast it to ``dtype``, within the context. Afterwards
    it has its old tensors again, because to copy a model from a GPU to pageable memory takes more
    than a second per GiB."""
    values = [(parameter, parameter.data) for parameter in model.parameters()]
    held = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    try:
        model.to(device=device, dtype=dtype)
        yield
    finally:
        for module, parameters, buffers in held:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        # between some devices, a parameter stays the same object and has a new value
        for parameter, data in values:
            parameter.data = data


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
