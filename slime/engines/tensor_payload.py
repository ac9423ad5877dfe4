"""Encode a bucket of tensors as the body of ``/update_weights_from_tensor``.

The body contains handles, not values: shared memory on the CPU, CUDA IPC on the GPU. The sender must keep the bucket
alive until the engine has answered. The body describes one buffer and the place of each tensor in it. :func:`payload`
encodes it for SGLang, as a pickle. :func:`handles` encodes it for the embedded engine, as plain JSON.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from slime.engines import local

if TYPE_CHECKING:
    import torch

    from slime.engines.flat import Bucket

_DEVICE_INDEX = 6  # the position of the device in the values that torch's reduce_tensor returns for a CUDA tensor
HANDLES = "handles"
"""The ``load_format`` of the embedded engine."""


def handles(bucket: Bucket, same_process: bool = False) -> dict[str, Any]:
    """Return ``load_format``, ``buffer`` and ``tensors`` for one embedded engine, which opens the buffer once.

    Args:
        same_process: Whether the engine is in this process; it then gets the buffer itself.
    """
    import torch.multiprocessing

    if not same_process:
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
    if same_process:
        described: dict[str, Any] = {"kind": "same_process", "name": local.offer(buffer)}
    else:
        described = _cuda_handle(buffer) if buffer.is_cuda else _shared_memory_handle(buffer)
    place = {"offset": buffer.storage_offset(), "nbytes": buffer.numel()}
    return {"load_format": HANDLES, "buffer": {**described, **place}, "tensors": entries}


def _shared_memory_handle(buffer: torch.Tensor) -> dict[str, Any]:
    """Describe a CPU buffer. This moves its storage into shared memory if it is not there already."""
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
    """Return the UUID of a device, because its index may be different in the process that opens the handle."""
    import torch

    return device if isinstance(device, str) else str(torch.cuda.get_device_properties(device).uuid)


def payload(bucket: Bucket, ranks: int = 1, others: Sequence[str] = ()) -> dict[str, Any]:
    """Return ``serialized_named_tensors`` and ``load_format`` for one engine with ``ranks`` tensor-parallel ranks.

    Every rank gets its own pickle, because each process that opens a CUDA handle also decreases its reference count.

    Args:
        others: The entries (see :func:`entry`) that other training ranks made from their copies of this bucket, for
            the second and later ranks of the engine. Without them, all ranks of the engine read this copy.

    Raises:
        ValueError: The number of ``others`` is neither 0 nor the number of the engine's other ranks.
    """
    if others and len(others) != ranks - 1:
        raise ValueError(
            f"{1 + len(others)} training ranks offer weights to an engine of {ranks} tensor-parallel ranks"
        )
    entries = [entry(bucket), *others] if others else [entry(bucket) for _ in range(ranks)]
    return {"serialized_named_tensors": entries, "load_format": "flattened_bucket"}


def entry(bucket: Bucket) -> str:
    """Return the entry for one tensor-parallel rank: the handle and the layout of the buffer. Only one process may
    open it."""
    buffer, tensors = _in_one_buffer(bucket)
    metadata = []
    for name, tensor in tensors:
        start = tensor.storage_offset() * tensor.element_size() - buffer.storage_offset()
        size = tensor.numel() * tensor.element_size()
        # SGLang accepts any object with these fields, and its unpickler allows this type.
        metadata.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=start + size, numel=size
            )
        )
    return pickled({"flattened_tensor": buffer, "metadata": metadata})


def _in_one_buffer(bucket: Bucket) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """Return the buffer of the bucket and the views into it, after a copy into a new buffer if there is none.

    The copy is necessary because making a handle moves the storage of a CPU tensor into shared memory, which must not
    happen to the parameters of the trainer.
    """
    import torch

    from slime.engines.flat import flatten, layout

    if bucket.flat is None:
        entries, size = layout(bucket.tensors)
        bucket.flat = flatten(bucket.tensors, entries, size)
        bucket.tensors = [(entry.name, entry.view(bucket.flat)) for entry in entries]
        if bucket.flat.is_cuda:  # the engine's process does not wait for this stream
            torch.cuda.current_stream(bucket.flat.device).synchronize()
    return bucket.flat, bucket.tensors


class _Pickler(ForkingPickler):
    """A pickler whose CUDA handles contain the UUID of the device instead of its index; see :func:`_device_uuid`.

    SGLang replaces ``rebuild_cuda_tensor`` in its processes by a function that accepts UUIDs.
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
    """Pickle ``value`` with handles in place of its tensors, and return the pickle in base64."""
    import torch.multiprocessing

    # The handle must be the name of a file: the other strategy passes file descriptors, and SGLang fails on them.
    torch.multiprocessing.set_sharing_strategy("file_system")
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return base64.b64encode(stream.getvalue()).decode()
