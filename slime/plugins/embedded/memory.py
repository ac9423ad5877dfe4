"""Release the memory of an engine while its GPU is used for training, and take it again."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from slime.plugins.embedded.runner import Runner

TAGS = ("weights", "kv_cache", "cuda_graph")
"""``cuda_graph`` is accepted because SGLang has it; this engine has no CUDA graphs."""


class Memory:
    """Releases memory by tag.

    Weights are not lost. On CUDA they are moved to pinned host memory and come back unchanged. On the CPU only their
    packed copies are freed.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.released: set[str] = set()
        self._host: dict[str, torch.Tensor] = {}

    def release(self, tags: list[str]) -> None:
        new = set(tags) - self.released
        if "kv_cache" in new:
            self.runner.cache.clear()
        if "weights" in new:
            if self.runner.packed is not None:
                self.runner.packed.drop()
            if self.runner.device.type == "cuda":
                self._to_host()
        self.released |= new
        gc.collect()
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()

    def resume(self, tags: list[str]) -> None:
        back = set(tags) & self.released
        if "weights" in back and self._host:
            self._to_device()
        self.released -= back

    def _storages(self) -> dict[str, torch.UntypedStorage]:
        """Return the storages of the model, each of them once, because tied tensors share a storage.

        Resizing a storage keeps all views into it valid, so no tensor of the model has to be replaced.
        """
        model = self.runner.model
        tensors = [*model.named_parameters(), *model.named_buffers()]
        unique = {tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in tensors}
        return {name: tensor.untyped_storage() for name, tensor in unique.values()}

    def _to_host(self) -> None:
        for name, storage in self._storages().items():
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            host = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            self._host[name] = host
        torch.cuda.synchronize(self.runner.device)  # the copies must be complete before the storages are freed
        for storage in self._storages().values():
            storage.resize_(0)

    def _to_device(self) -> None:
        for name, storage in self._storages().items():
            host = self._host[name]
            storage.resize_(host.numel())
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            flat.copy_(host, non_blocking=True)
        torch.cuda.synchronize(self.runner.device)
        self._host.clear()
