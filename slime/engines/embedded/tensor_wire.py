"""Tensors inside an HTTP body: what ``/update_weights_from_tensor`` carries.

As in SGLang, an entry is a base64 string of a pickle made by torch's ForkingPickler, in which tensors are
handles to shared memory (CPU) or CUDA IPC handles. Only names that such a pickle needs are resolved.
"""

from __future__ import annotations

import base64
import io
import pickle
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing  # registers the reducers

_ALLOWED_MODULES = ("torch.", "collections.", "multiprocessing.", "numpy.")
_DEVICE_INDEX = 6  # of the device among the arguments of torch's rebuild_cuda_tensor
_ALLOWED_BUILTINS = {"list", "dict", "tuple", "set", "slice", "int", "float", "complex", "bytearray"}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "FlattenedTensorMetadata" or (module, name) == ("types", "SimpleNamespace"):
            return SimpleNamespace  # one tensor in a flattened bucket: its name, shape, dtype, start and end
        if name == "rebuild_cuda_tensor":
            return _rebuild_cuda_tensor
        if module == "builtins" and name in _ALLOWED_BUILTINS:
            return super().find_class(module, name)
        if module != "builtins" and (module + ".").startswith(_ALLOWED_MODULES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in serialized_named_tensors")


def read_named_tensors(entry: str, load_format: str | None) -> list[tuple[str, torch.Tensor]]:
    """Decode one entry.

    Args:
        entry: base64 of a pickled list of (name, tensor); with ``load_format="flattened_bucket"`` of a dict
            with ``flattened_tensor`` (uint8, all tensors end to end) and ``metadata``.

    Raises:
        ValueError: an unknown format.
    """
    value = _Unpickler(io.BytesIO(base64.b64decode(entry, validate=True))).load()
    if load_format in (None, "direct", "auto"):
        return list(value.items()) if isinstance(value, dict) else list(value)
    if load_format != "flattened_bucket":
        raise ValueError(f"load_format {load_format!r} is not known; use none or 'flattened_bucket'")
    flat = value["flattened_tensor"].view(torch.uint8)
    tensors = []
    for meta in value["metadata"]:
        if isinstance(meta, dict):
            meta = SimpleNamespace(**meta)
        part = flat[meta.start_idx : meta.end_idx]
        if part.storage_offset() % meta.dtype.itemsize:
            part = part.clone()  # a view of another dtype needs an aligned start
        tensors.append((meta.name, part.view(meta.dtype).reshape(tuple(meta.shape))))
    return tensors


def _rebuild_cuda_tensor(*values: Any) -> torch.Tensor:
    """torch's own function, for a device that is given by UUID.

    Raises:
        ValueError: this process does not see that device.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    device = values[_DEVICE_INDEX]
    if isinstance(device, str):
        seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        if device not in seen:
            raise ValueError(f"the tensors are on GPU {device}, this engine sees {', '.join(seen) or 'none'}")
        values = (*values[:_DEVICE_INDEX], seen.index(device), *values[_DEVICE_INDEX + 1 :])
    tensor: torch.Tensor = rebuild_cuda_tensor(*values)
    return tensor
