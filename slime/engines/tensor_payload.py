"""A bucket of tensors as the body of ``/update_weights_from_tensor``.

The body holds handles, not values: shared memory on the CPU, CUDA IPC on the GPU. The sender keeps the bucket alive
until the engine has answered. There is one buffer, and the place of each tensor in it. :func:`payload` writes this in
SGLang's form, a pickle; :func:`handles` in the embedded engine's form, plain JSON.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from slime.engines.flat import Bucket

_DEVICE_INDEX = 6  # of the device in what torch's reduce_tensor returns for a CUDA tensor
HANDLES = "handles"
"""``load_format`` of the embedded engine's form."""


def handles(bucket: Bucket) -> dict[str, Any]:
    """``load_format``, ``buffer`` and ``tensors`` for one embedded engine, which opens the buffer once."""
    import torch.multiprocessing

    torch.multiprocessing.set_sharing_strategy("file_system")
    buffer, tensors = _in_one_buffer(bucket)
    entries = [
        {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "offset": tensor.storage_offset() * tensor.element_size() - buffer.storage_offset(),
            "nbytes": tensor.numel() * tensor.element_size(),
        }
        for name, tensor in tensors
    ]
    described = _cuda_handle(buffer) if buffer.is_cuda else _shared_memory_handle(buffer)
    place = {"offset": buffer.storage_offset(), "nbytes": buffer.numel()}
    return {"load_format": HANDLES, "buffer": {**described, **place}, "tensors": entries}


def _shared_memory_handle(buffer: torch.Tensor) -> dict[str, Any]:
    """Moves the storage into shared memory if it does not lie there yet."""
    storage = buffer.untyped_storage()
    manager, name, size = storage._share_filename_cpu_()
    return {"kind": "shared_memory", "manager": manager.decode(), "name": name.decode(), "storage_nbytes": size}


def _cuda_handle(buffer: torch.Tensor) -> dict[str, Any]:
    from torch.multiprocessing.reductions import reduce_tensor

    _, values = reduce_tensor(buffer)
    device, handle, size, offset, _, counter, counter_offset, event, wait = values[_DEVICE_INDEX:]
    return {
        "kind": "cuda_ipc",
        "device": _device_uuid(device),
        "handle": _base64(handle),
        "storage_nbytes": size,
        "storage_offset": offset,
        "ref_counter_handle": _base64(counter),
        "ref_counter_offset": counter_offset,
        "event_handle": _base64(event),
        "event_sync_required": wait,
    }


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _device_uuid(device: int | str) -> str:
    """A device's UUID: its index may be another one in the process that opens the handle."""
    import torch

    return device if isinstance(device, str) else str(torch.cuda.get_device_properties(device).uuid)


def payload(bucket: Bucket, ranks: int = 1, others: Sequence[str] = ()) -> dict[str, Any]:
    """``serialized_named_tensors`` and ``load_format`` for one engine of ``ranks`` tensor-parallel ranks.

    Every rank gets a pickle of its own, because each that opens a CUDA handle also counts it down.

    Args:
        others: entries (:func:`entry`) that other training ranks made of their copies of this bucket, for the engine's
            ranks from the second on; without any, all ranks read this copy.

    Raises:
        ValueError: there are entries, but not one for each of the engine's other ranks.
    """
    if others and len(others) != ranks - 1:
        raise ValueError(
            f"{1 + len(others)} training ranks offer weights to an engine of {ranks} tensor-parallel ranks"
        )
    entries = [entry(bucket), *others] if others else [entry(bucket) for _ in range(ranks)]
    return {"serialized_named_tensors": entries, "load_format": "flattened_bucket"}


def entry(bucket: Bucket) -> str:
    """The entry of one tensor-parallel rank: handle and layout of the bucket's buffer, for one process to open."""
    buffer, tensors = _in_one_buffer(bucket)
    metadata = []
    for name, tensor in tensors:
        start = tensor.storage_offset() * tensor.element_size() - buffer.storage_offset()
        size = tensor.numel() * tensor.element_size()
        # SGLang reads these fields of any object, and admits this type in pickles.
        metadata.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=start + size, numel=size
            )
        )
    return pickled({"flattened_tensor": buffer, "metadata": metadata})


def _in_one_buffer(bucket: Bucket) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """The bucket's buffer, or a copy of its tensors in one: pickling moves a CPU tensor's storage into shared
    memory, which must not happen to a trainer's parameters."""
    import torch

    from slime.engines.flat import flatten, layout

    if bucket.flat is None:
        entries, size = layout(bucket.tensors)
        bucket.flat = flatten(bucket.tensors, entries, size)
        bucket.tensors = [(entry.name, entry.view(bucket.flat)) for entry in entries]
        if bucket.flat.is_cuda:
            torch.cuda.current_stream(bucket.flat.device).synchronize()
    return bucket.flat, bucket.tensors


class _Pickler(ForkingPickler):
    """CUDA handles with the UUID of their device (see :func:`_device_uuid`).

    SGLang replaces ``rebuild_cuda_tensor`` in its own processes by a function that takes UUIDs.
    """

    def reducer_override(self, value: object) -> Any:
        import torch
        from torch.multiprocessing import reductions

        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            return NotImplemented
        rebuild, values = reductions.reduce_tensor(value)
        device = _device_uuid(values[_DEVICE_INDEX])
        return rebuild, (*values[:_DEVICE_INDEX], device, *values[_DEVICE_INDEX + 1 :])


def pickled(value: object) -> str:
    """Base64 of a pickle that holds handles to the tensors in ``value``."""
    import torch.multiprocessing

    torch.multiprocessing.set_sharing_strategy("file_system")  # SGLang does not survive passed file descriptors
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return base64.b64encode(stream.getvalue()).decode()
