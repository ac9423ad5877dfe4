"""Buckets of named tensors, their layout in one flat buffer of bytes, and the requests that send
them to engines.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from slime.engines import local

if TYPE_CHECKING:
    import torch


NamedTensor = tuple[str, "torch.Tensor"]
ALIGNMENT = 64  # bytes; enough for any dtype, and copies run at full speed


@dataclass
class Bucket:
    """Tensors that are sent together. The sender keeps them alive until the engine has answered.

    Attributes:
        index: The number of the bucket in its update.
        last: Whether this is the last bucket of the update.
        flat: The uint8 buffer into which all tensors are views, so that it can be sent as a whole.
            None if the tensors do not share a buffer.
        adapter: Whether these are all factors of an adapter (LoRA) for engines that load adapters
            by name, and no weights of the model.
    """

    index: int
    tensors: list[NamedTensor]
    last: bool = False
    flat: torch.Tensor | None = None
    adapter: bool = False

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors)


@dataclass(frozen=True)
class Entry:
    """The place of one tensor in the flat buffer of its bucket."""

    name: str
    dtype: str  # without the prefix "torch.", for example "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int

    def torch_dtype(self) -> torch.dtype:
        """Return the dtype. Raises :class:`ValueError` if torch has no dtype of this name."""
        import torch

        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"tensor {self.name}: torch has no dtype {self.dtype!r}")
        return dtype

    def size_of_values(self) -> int:
        """Return the size in bytes that follows from shape and dtype; ``nbytes`` may come from
        another process.
        """
        return math.prod(self.shape) * self.torch_dtype().itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        dtype = self.torch_dtype()
        return flat[self.offset : self.offset + self.nbytes].view(dtype).view(self.shape)


def layout(tensors: Sequence[NamedTensor], alignment: int = ALIGNMENT) -> tuple[list[Entry], int]:
    """Compute the place of each tensor in a flat buffer, and the size of the buffer in bytes.

    Args:
        alignment: Each tensor starts at a multiple of this number of bytes. With 1 there are no
            gaps between tensors. The tensors must then be sorted by :func:`by_element_size`,
            because a view needs a start that is a multiple of its element size.
    """
    entries = []
    end = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(
            Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, nbytes)
        )
        end += -(-nbytes // alignment) * alignment
    return entries, end


def by_element_size(tensors: Sequence[NamedTensor]) -> list[NamedTensor]:
    """Sort tensors by element size, largest first, and keep the given order among equal sizes.

    In this order every tensor of a buffer without gaps starts at a multiple of its element size.
    """
    return sorted(tensors, key=lambda pair: -pair[1].element_size())


def flatten(
    tensors: Sequence[NamedTensor],
    entries: Sequence[Entry],
    size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Copy tensors into one flat uint8 buffer on their device: into ``out``, or into a new buffer
    with zeroed gaps.
    """
    import torch

    flat = (
        torch.zeros(size, dtype=torch.uint8, device=tensors[0][1].device)
        if out is None
        else out[:size]
    )
    views = [entry.view(flat) for entry in entries]
    torch._foreach_copy_(views, [tensor.detach() for _, tensor in tensors])
    return flat


# Encode a bucket of tensors as the body of ``/update_weights_from_tensor``.
#
# The body contains handles, not values: shared memory on the CPU, CUDA IPC on the GPU. The sender
# must keep the bucket alive until the engine has answered. The body describes one buffer and the
# place of each tensor in it. payload() encodes it for SGLang, as a pickle. handles() encodes it for
# the embedded engine, as plain JSON.


# the position of the device in the values that torch's reduce_tensor returns for a CUDA tensor
_DEVICE_INDEX = 6
HANDLES = "handles"
"""The ``load_format`` of the embedded engine."""


def handles(bucket: Bucket, same_process: bool = False) -> dict[str, Any]:
    """Return ``load_format``, ``buffer`` and ``tensors`` for one embedded engine, which opens the
    buffer once.

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
    """Describe a CPU buffer. This moves its storage into shared memory if it is not there
    already.
    """
    storage = buffer.untyped_storage()
    manager, name, size = storage._share_filename_cpu_()
    return {
        "kind": "shared_memory",
        "manager": manager.decode(),
        "name": name.decode(),
        "storage_nbytes": size,
    }


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
    """Return the UUID of a device, because its index may be different in the process that opens the
    handle.
    """
    import torch

    return device if isinstance(device, str) else str(torch.cuda.get_device_properties(device).uuid)


def payload(bucket: Bucket, ranks: int = 1, others: Sequence[str] = ()) -> dict[str, Any]:
    """Return ``serialized_named_tensors`` and ``load_format`` for one engine with ``ranks``
    tensor-parallel ranks.

    Every rank gets its own pickle, because each process that opens a CUDA handle also decreases its
    reference count.

    Args:
        others: The entries (see :func:`entry`) that other training ranks made from their copies of
            this bucket, for the second and later ranks of the engine. Without them, all ranks of
            the engine read this copy.

    Raises:
        ValueError: The number of ``others`` is neither 0 nor the number of the engine's other
            ranks.
    """
    if others and len(others) != ranks - 1:
        raise ValueError(
            f"{1 + len(others)} training ranks offer weights to an engine of {ranks} "
            "tensor-parallel ranks"
        )
    entries = [entry(bucket), *others] if others else [entry(bucket) for _ in range(ranks)]
    return {"serialized_named_tensors": entries, "load_format": "flattened_bucket"}


def entry(bucket: Bucket) -> str:
    """Return the entry for one tensor-parallel rank: the handle and the layout of the buffer. Only
    one process may open it."""
    buffer, tensors = _in_one_buffer(bucket)
    metadata = []
    for name, tensor in tensors:
        start = tensor.storage_offset() * tensor.element_size() - buffer.storage_offset()
        size = tensor.numel() * tensor.element_size()
        # SGLang accepts any object with these fields, and its unpickler allows this type.
        metadata.append(
            SimpleNamespace(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=start,
                end_idx=start + size,
                numel=size,
            )
        )
    return pickled({"flattened_tensor": buffer, "metadata": metadata})


def _in_one_buffer(bucket: Bucket) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """Return the buffer of the bucket and the views into it, after a copy into a new buffer if
    there is none.

    The copy is necessary because making a handle moves the storage of a CPU tensor into shared
    memory, which must not happen to the parameters of the trainer.
    """
    import torch

    if bucket.flat is None:
        entries, size = layout(bucket.tensors)
        bucket.flat = flatten(bucket.tensors, entries, size)
        bucket.tensors = [(entry.name, entry.view(bucket.flat)) for entry in entries]
        if bucket.flat.is_cuda:  # the engine's process does not wait for this stream
            torch.cuda.current_stream(bucket.flat.device).synchronize()
    return bucket.flat, bucket.tensors


class _Pickler(ForkingPickler):
    """A pickler whose CUDA handles contain the UUID of the device instead of its index; see
    :func:`_device_uuid`.

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

    # The handle must be the name of a file: the other strategy passes file descriptors, and SGLang
    # fails on them.
    torch.multiprocessing.set_sharing_strategy("file_system")
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return base64.b64encode(stream.getvalue()).decode()


# Encode the factors of an adapter as the body of SGLang's ``/load_lora_adapter_from_tensors``.


@dataclass(frozen=True)
class AdapterPayload:
    """The factors of one version of an adapter.

    The tensors are on the CPU, because SGLang keeps loaded adapters in host memory and copies them
    to its device when a batch needs them.

    Attributes:
        bucket: The factors by their names in PEFT's files.
        digests: The SHA-256 of each factor, which SGLang from 0.5.23 on compares before it loads
            them; None to compare nothing.
        shared: Whether the engines are on this host and open the factors in shared memory.
            Otherwise the body contains the values.
    """

    bucket: Bucket
    digests: Mapping[str, str] | None
    shared: bool

    def body(self, ranks: int, newest: bool) -> dict[str, object]:
        """Return the fields of the body that describe the tensors.

        Args:
            ranks: The number of tensor-parallel ranks of the engine, each of which cuts its part
                out of the factors.
            newest: Whether the server is SGLang 0.5.23 or later. It takes one copy for each rank,
                and digests; 0.5.15 takes one copy for all ranks.
        """
        if not newest:
            return {"serialized_tensors": self._copy(), "load_format": self._format}
        copies = [self._copy() for _ in range(ranks)]
        checked = {} if self.digests is None else {"expected_checksums": dict(self.digests)}
        return {"serialized_named_tensors": copies, "load_format": self._format, **checked}

    @property
    def _format(self) -> str | None:
        return "flattened_bucket" if self.shared else None

    def _copy(self) -> str:

        if self.shared:
            return entry(self.bucket)
        return base64.b64encode(pickle.dumps(dict(self.bucket.tensors))).decode()


@dataclass(frozen=True)
class AdapterRequest:
    """An encoded request to one engine, which loads an adapter; see
    :meth:`slime.engines.handle.EngineHandle.adapter_request`."""

    name: str
    path: str
    body: bytes


def sglang_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return PEFT's configuration with the last parts of the names of the layers, which are all
    that SGLang compares.

    SGLang reads all names again for each factor. With the 252 whole names of an 8B model, this
    takes half of the time in which it loads an adapter.
    """
    names = cast("Sequence[str]", config["target_modules"])
    return {**config, "target_modules": sorted({name.rpartition(".")[2] for name in names})}


def adapter_payload(
    bucket: Bucket, digests: bool, memory: Callable[[int], torch.Tensor] | None
) -> AdapterPayload:
    """Copy the factors to host memory, and compute their digests if these are wanted.

    Args:
        memory: Returns shared memory of a number of bytes, into which the factors are copied (see
            :func:`shared_memory`). None to copy them into memory of their own, because the engines
            are on other hosts.
    """
    import torch

    entries, size = layout(bucket.tensors)
    flat = torch.zeros(size, dtype=torch.uint8) if memory is None else memory(size)
    if bucket.tensors[0][1].is_cuda:  # one copy between the devices
        flat.copy_(flatten(bucket.tensors, entries, size))
    else:
        flatten(bucket.tensors, entries, size, flat)
    own = [(entry.name, entry.view(flat)) for entry in entries]
    if memory is None:  # a pickle of a view would contain the whole buffer
        own = [(name, tensor.clone()) for name, tensor in own]
    copy = Bucket(bucket.index, own, bucket.last, None if memory is None else flat, adapter=True)
    sums = {name: _sha256(tensor) for name, tensor in own} if digests else None
    assert all(tensor.device == torch.device("cpu") for _, tensor in own)
    return AdapterPayload(copy, sums, shared=memory is not None)


def shared_memory(size: int) -> torch.Tensor:
    """Return zeroed bytes that other processes can open by name."""
    import torch

    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _sha256(tensor: torch.Tensor) -> str:
    import torch

    return hashlib.sha256(
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    ).hexdigest()
