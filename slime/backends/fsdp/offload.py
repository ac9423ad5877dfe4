"""Give accelerator memory back between training phases, and take it again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from slime.backends.fsdp.optimizer import local


class Offloader:
    """Moves the bytes behind tensors to pinned CPU memory and back, in place.

    It frees each storage and later gives it its size again, so every alias (FSDP's views of its shards,
    the optimizer's references) stays what it was.
    """

    def __init__(self) -> None:
        self._asleep: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._pinned: dict[int, Tensor] = {}

    @property
    def asleep(self) -> bool:
        return bool(self._asleep)

    @torch.no_grad()
    def sleep(self, tensors: Iterable[Tensor]) -> int:
        """Returns the bytes given back; 0 on the CPU."""
        storages = {}
        for tensor in tensors:
            part = local(tensor)
            if part.is_cuda and part.untyped_storage().nbytes():
                storages[part.untyped_storage().data_ptr()] = part.untyped_storage()
        for order, storage in enumerate(storages.values()):
            nbytes = storage.nbytes()
            host = self._pinned.get(order)
            if host is None or host.numel() != nbytes:
                host = self._pinned[order] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            host.copy_(_bytes(storage), non_blocking=True)
            self._asleep.append((storage, host))
        if not self._asleep:
            return 0
        torch.cuda.synchronize()
        freed = sum(host.numel() for _, host in self._asleep)
        for storage, _ in self._asleep:
            storage.resize_(0)
        torch.cuda.empty_cache()
        return freed

    @torch.no_grad()
    def wake(self) -> None:
        for storage, host in self._asleep:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        if self._asleep:
            torch.cuda.synchronize()
        self._asleep.clear()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
