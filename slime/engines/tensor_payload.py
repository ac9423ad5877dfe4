"""A bucket of tensors as the body of ``/update_weights_from_tensor``.

The body holds handles, not values: shared memory on the CPU, CUDA IPC on the GPU. The sender keeps the
bucket alive until the engine has answered.
"""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from slime.weights.update import Bucket


def payload(bucket: Bucket, flat: bool) -> dict[str, Any]:
    """``serialized_named_tensors`` (and ``load_format``) for one engine of one rank.

    Args:
        flat: one buffer and plain metadata, which the embedded engine reads; else a list of (name, tensor),
            which every generation of SGLang does.
    """
    buffer, tensors = _in_one_buffer(bucket)
    if not flat:
        return {"serialized_named_tensors": [_pickled(tensors)], "load_format": None}
    metadata = []
    for name, tensor in tensors:
        start = tensor.storage_offset() * tensor.element_size() - buffer.storage_offset()
        size = tensor.numel() * tensor.element_size()
        metadata.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "start_idx": start,
                "end_idx": start + size,
                "numel": size,
            }
        )
    entry = _pickled({"flattened_tensor": buffer, "metadata": metadata})
    return {"serialized_named_tensors": [entry], "load_format": "flattened_bucket"}


def _in_one_buffer(bucket: Bucket) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """The bucket's buffer, or a copy of its tensors in one: pickling moves a CPU tensor's storage into shared
    memory, which must not happen to a trainer's parameters."""
    import torch

    if bucket.flat is not None:
        return bucket.flat, bucket.tensors
    align = 16
    sizes = [-(-tensor.numel() * tensor.element_size() // align) * align for _, tensor in bucket.tensors]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=bucket.tensors[0][1].device)
    views, start = [], 0
    for (name, tensor), size in zip(bucket.tensors, sizes, strict=True):
        part = buffer[start : start + tensor.numel() * tensor.element_size()]
        view = part.view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor.detach())
        views.append((name, view))
        start += size
    if buffer.is_cuda:
        torch.cuda.current_stream(buffer.device).synchronize()
    bucket.flat, bucket.tensors = buffer, views
    return buffer, views


def _pickled(value: Any) -> str:
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing

    torch.multiprocessing.set_sharing_strategy("file_system")  # SGLang does not survive passed file descriptors
    stream = io.BytesIO()
    ForkingPickler(stream).dump(value)
    return base64.b64encode(stream.getvalue()).decode()
