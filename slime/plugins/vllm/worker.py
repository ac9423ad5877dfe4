"""What vLLM's worker processes do for slime: receive weights, and tell which they have.

vLLM mixes :class:`SlimeWorker` into its worker class (``--worker-extension-cls``), and the server
calls the methods on all ranks (``collective_rpc``). The bodies of requests reach them as JSON.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import torch
from vllm import _custom_ops
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from slime.models.digest import tensor_digest
from slime.plugins.embedded.tensor_wire import announced, join_group, read_tensors, receive

WATCH_SECONDS = 1.0

if current_platform.is_cpu():
    # oneDNN keeps a packed copy of each matrix, and vLLM drops the matrix itself, so that nobody
    # could tell whether the weights are right. Without oneDNN, torch multiplies by the matrix.
    _custom_ops._supports_onednn = False


def end_with_server() -> None:
    """End vLLM's core process, and with it this one, when the server is gone.

    The core process starts the workers and does not notice that the server was killed.
    """
    core = psutil.Process(os.getppid())
    server = core.ppid()

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while core.ppid() == server:
                time.sleep(WATCH_SECONDS)
            core.kill()

    threading.Thread(target=watch, name="watch-server", daemon=True).start()


if multiprocessing.parent_process() is not None:  # in a worker
    end_with_server()


class SlimeWorker:
    """Methods for vLLM's worker class, of which these attributes come.

    Attributes:
        rank: The rank among the tensor-parallel workers of the engine.
    """

    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any
    _slime_groups: dict[str, Any]
    _slime_loads = False

    def slime_end(self) -> None:
        """End an update. Layers without new weights get their old ones back."""
        if not self._slime_loads:  # only an adapter has changed
            return
        self._slime_loads = False
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)

    def slime_tensors(self, body: str) -> None:
        """Load the tensors of ``/update_weights_from_tensor``."""
        # A layer keeps them until it is complete, and the sender takes its memory back before.
        self._slime_load(
            [(name, tensor.clone()) for name, tensor in read_tensors(json.loads(body))]
        )

    def _slime_load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load tensors in the form of the checkpoint.

        From the first ones of an update on, each layer collects its tensors, and when it has all of
        them, they take the place of the old ones in the layout that its kernels need.
        """
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            if not self._slime_loads:
                initialize_layerwise_reload(model)
                self._slime_loads = True
            loaded = model.load_weights(iter(tensors))
        if not loaded:
            names = ", ".join(name for name, _ in tensors[:3])
            raise ValueError(f"the model has none of the {len(tensors)} tensors: {names} …")
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # the next step runs on another stream

    def slime_join(
        self,
        address: str,
        port: int,
        rank_offset: int,
        world: int,
        name: str,
        backend: str,
        seconds: float,
    ) -> None:
        """Join the process group in which rank 0, the trainer, sends weights."""
        rank = rank_offset + self.rank
        timeout = timedelta(seconds=seconds)
        group = join_group(address, port, rank, world, name, backend, timeout)
        self._slime_groups = {**getattr(self, "_slime_groups", {}), name: group}

    def slime_leave(self, name: str) -> None:
        torch.distributed.destroy_process_group(self._slime_groups.pop(name))

    def slime_receive(self, body: str) -> None:
        """Take part in the broadcast of ``/update_weights_from_distributed``, and load it."""
        asked = json.loads(body)
        group = self._slime_groups[asked["group_name"]]
        tensors, flat = announced(asked)
        self._slime_load(receive(tensors, group, self.device, flat))

    def slime_reload(self, folder: str) -> None:
        """Load the checkpoint in a folder."""
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_path=folder)

    def slime_names(self) -> list[str]:
        return [name for name, _ in self._slime_named()]

    def slime_checksums(self) -> dict[str, str]:
        """Return the digest of each tensor (:func:`slime.models.digest.tensor_digest`)."""
        return {name: tensor_digest(tensor) for name, tensor in self._slime_named()}

    def slime_values(self, name: str, most: int) -> list[Any] | None:
        """Return the first rows of a tensor; None if there is none of this name."""
        named = dict(self._slime_named())
        return named[name][:most].float().tolist() if name in named else None

    def slime_reset(self) -> None:
        """Set all weights to zero."""
        for parameter in self.model_runner.get_model().parameters():
            parameter.data.zero_()

    def slime_snapshot(self) -> None:
        """Keep a copy of all tensors in host memory, for :meth:`slime_compare`."""
        named = self._slime_named()
        self._slime_copies = {name: tensor.to("cpu", copy=True) for name, tensor in named}

    def slime_compare(self) -> list[str]:
        """Return the names of the tensors that differ from the snapshot, which is dropped."""
        copies = self._slime_copies
        self._slime_copies = {}
        return [n for n, tensor in self._slime_named() if not torch.equal(tensor.cpu(), copies[n])]

    def _slime_named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights, by the names of the checkpoint where it follows from the layer.

        vLLM joins the matrices of some projections, such as ``qkv_proj``. Experts, quantized
        weights and the parts of tensor-parallel ranks have vLLM's own names or shapes.
        """
        model = self.model_runner.get_model()
        seen: set[int] = set()  # tied parameters count once
        joined: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        for path, module in model.named_modules(remove_duplicate=True):
            parent, _, own = path.replace(".base_layer", "").rpartition(".")
            for kind, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                tensor = parameter.detach()
                sizes = getattr(module, "output_sizes", None)
                if own in joined and sizes and sum(sizes) == len(tensor):
                    parts = zip(joined[own], tensor.split(list(sizes)), strict=True)
                    yield from ((f"{parent}.{name}.{kind}", part) for name, part in parts)
                    continue
                rows = getattr(module, "org_vocab_size", len(tensor))  # it is padded
                yield f"{parent}.{own}.{kind}".lstrip("."), tensor[:rows]
