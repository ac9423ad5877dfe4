"""Receive the tensors of an update: open the buffers of ``/update_weights_from_tensor`` (see
:mod:`slime.engines.payload`), or join the process group of the trainer and read what it broadcasts.
Workers of other engines import this too, so it needs nothing but torch.

A request with buffers contains data only: JSON with the name of a shared memory file (CPU) or a CUDA IPC
handle, and the dtype, shape and place of each tensor. Nothing in it is unpickled or imported. With
pickles, which SGLang accepts, everyone who can reach the port could execute code.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from slime.engines import local
from slime.engines.payload import HANDLES, Entry
from slime.plugins.http.server import (
    BadRequest,
    Check,
    json_object,
    list_of,
    need,
    one_of,
    refuse,
    string,
    take,
    truth,
    whole,
)

_SHARED_MEMORY = Path("/dev/shm")
_FILE_NAME = re.compile(r"/torch_[0-9]+_[0-9]+_[0-9]+\Z")
_HEADER_BYTES = 64  # the size of torch's header before the data in a shared memory file
MAX_TENSORS = 2**20  # per request
_SIZE = whole(0, 2**48)  # bytes; larger than any buffer
_NAME = string(4096)
_SHAPE = list_of(whole(0, 2**48), 16)
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_DTYPE = one_of(*DTYPES)


def read_tensors(body: Mapping[str, object]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a body made by :func:`slime.engines.payload.handles`, as views of its
    buffer.

    Raises:
        BadRequest: The body has another format, or a handle does not fit the memory that it names.
    """
    if body.get("load_format") != HANDLES:
        raise BadRequest(
            f"load_format must be {HANDLES!r} with the fields buffer and tensors; this "
            "engine accepts no pickles (serialized_named_tensors), because unpickling a request "
            "can execute code"
        )
    buffer = need(body, "buffer", json_object)
    entries = need(body, "tensors", list_of(json_object, MAX_TENSORS))
    openers = {"shared_memory": _open_shared_memory, "cuda_ipc": _open_cuda, "same_process": _take}
    opener = openers[need(buffer, "kind", one_of(*openers), "buffer.")]
    nbytes = need(buffer, "nbytes", _SIZE, "buffer.")
    places = [_entry(entry, f"tensors[{index}]", nbytes) for index, entry in enumerate(entries)]
    flat = opener(buffer, nbytes)
    return [(place.name, _view(place, flat)) for place in places]


def _view(place: Entry, flat: torch.Tensor) -> torch.Tensor:
    part = flat[place.offset : place.offset + place.nbytes]
    if part.storage_offset() % DTYPES[place.dtype].itemsize:
        part = part.clone()  # a view with another dtype needs an aligned start
    return part.view(DTYPES[place.dtype]).reshape(place.shape)


def _entry(described: Mapping[str, object], where: str, nbytes: int) -> Entry:
    """Return the place of one tensor after checking that it lies in a buffer of ``nbytes``
    bytes.
    """
    name = need(described, "name", _NAME, f"{where}.")
    dtype = need(described, "dtype", _DTYPE, f"{where}.")
    shape = need(described, "shape", _SHAPE, f"{where}.")
    offset = need(described, "offset", _SIZE, f"{where}.")
    size = need(described, "nbytes", _SIZE, f"{where}.")
    entry = Entry(name, dtype, tuple(shape), offset, size)
    if size != entry.size_of_values():
        raise BadRequest(
            f"{where}: {dtype} of shape {shape} has {entry.size_of_values()} bytes, but nbytes is "
            f"{size}"
        )
    if offset + size > nbytes:
        raise BadRequest(f"{where} ends at byte {offset + size}, but the buffer has {nbytes}")
    return entry


def _take(buffer: Mapping[str, object], nbytes: int) -> torch.Tensor:
    """Take a buffer that the trainer, in this process, has offered under a name that only it
    knows.
    """
    tensor = local.take(need(buffer, "name", _ascii, "buffer."))
    if tensor is None or tensor.numel() != nbytes:
        raise BadRequest("buffer.name is not that of a buffer in this process")
    return tensor


def _open_shared_memory(buffer: Mapping[str, object], nbytes: int) -> torch.Tensor:
    """Map a shared memory file of torch that belongs to this user.

    Its reference count is decreased when the tensor is freed.
    """
    manager = need(buffer, "manager", _ascii, "buffer.")
    name = need(buffer, "name", _ascii, "buffer.")
    size = need(buffer, "storage_nbytes", _SIZE, "buffer.")
    offset = need(buffer, "offset", _SIZE, "buffer.")
    if not _FILE_NAME.match(name):
        raise BadRequest(f"buffer.name {name!r} is not the name of a shared memory file of torch")
    if offset + nbytes > size:
        raise BadRequest(
            f"buffer: {nbytes} bytes at {offset} do not fit into storage_nbytes {size}"
        )
    # Only a regular file and a socket of this user are opened. With lstat(), a link is not a
    # regular file.
    try:
        file = os.lstat(_SHARED_MEMORY / name[1:])
        service = os.stat(manager)
    except (OSError, ValueError) as error:
        raise BadRequest(f"buffer {name!r} cannot be opened: {error}") from error
    if (
        not stat.S_ISREG(file.st_mode)
        or file.st_uid != os.geteuid()
        or file.st_size < size + _HEADER_BYTES
    ):
        raise BadRequest(f"buffer.name {name!r} is not a file of this user with {size} bytes")
    if not stat.S_ISSOCK(service.st_mode) or service.st_uid != os.geteuid():
        raise BadRequest("buffer.manager is not a socket of this user")
    storage = torch.UntypedStorage._new_shared_filename_cpu(manager.encode(), name.encode(), size)
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (nbytes,), (1,))


def _open_cuda(buffer: Mapping[str, object], nbytes: int) -> torch.Tensor:
    """Open memory of another process on a GPU that both processes see. torch checks the handle."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    # Every field is checked here, because torch takes the handle apart in C++.
    handle: dict[str, Any] = {
        name: need(buffer, name, check, "buffer.") for name, check in _CUDA_HANDLE.items()
    }
    # The index of a GPU may differ between the two processes, so it is named by its UUID.
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if handle["device"] not in seen:
        raise BadRequest(
            f"the tensors are on GPU {handle['device']}, but this engine sees "
            f"{', '.join(seen) or 'none'}"
        )
    if not _FILE_NAME.match(handle["ref_counter_handle"].rstrip(b"\0").decode("ascii", "replace")):
        raise BadRequest(
            "buffer.ref_counter_handle is not the name of a shared memory file of torch"
        )
    tensor: torch.Tensor = rebuild_cuda_tensor(
        torch.Tensor,
        (nbytes,),
        (1,),
        handle["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        seen.index(handle["device"]),
        handle["handle"],
        handle["storage_nbytes"],
        handle["storage_offset"],
        False,
        handle["ref_counter_handle"],
        handle["ref_counter_offset"],
        handle["event_handle"],
        handle["event_sync_required"],
    )
    return tensor


def _ascii(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.isascii() or "\0" in value:
        raise refuse(name, "must be a string of ASCII characters", value)
    return value


def _base64(value: object, name: str) -> bytes:
    try:
        return base64.b64decode(_ascii(value, name), validate=True)
    except binascii.Error as error:
        raise BadRequest(f"{name} must be base64: {error}") from error


_CUDA_HANDLE: dict[str, Check[object]] = {
    "device": _ascii,
    "offset": _SIZE,
    "handle": _base64,
    "storage_nbytes": _SIZE,
    "storage_offset": _SIZE,
    "ref_counter_handle": _base64,
    "ref_counter_offset": _SIZE,
    "event_handle": _base64,
    "event_sync_required": truth,
}
"""The check of each field of a CUDA IPC handle."""


GROUP_TIMEOUT = timedelta(seconds=120)
FLAT = "flattened_bucket"


def join_group(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout: timedelta = GROUP_TIMEOUT,
) -> ProcessGroup:
    """Join a process group with a rendezvous at ``tcp://address:port``. All members must call this
    at the same time.

    The keys in the store have the prefix ``name``, as in SGLang's ``init_custom_process_group``, so
    that both kinds of members can join the same group.
    """
    url = f"tcp://{address}:{port}"
    store, rank, world_size = next(rendezvous(url, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=cast(Any, name),  # the annotated type differs between versions of torch
        backend_options=None,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


class Announced(NamedTuple):
    """A tensor that rank 0 is about to broadcast."""

    name: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.shape.numel()


def announced(body: Mapping[str, object]) -> tuple[list[Announced], bool]:
    """Return the tensors that a body of ``/update_weights_from_distributed`` announces, and whether
    they come in one broadcast.
    """
    names = need(body, "names", list_of(_NAME, MAX_TENSORS))
    dtypes = need(body, "dtypes", list_of(one_of(*DTYPES), MAX_TENSORS))
    shapes = need(body, "shapes", list_of(list_of(whole(0, 2**40), 16), MAX_TENSORS))
    if not len(names) == len(dtypes) == len(shapes):
        raise BadRequest(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes must have the "
            "same number"
        )
    tensors = [
        Announced(name, DTYPES[dtype], torch.Size(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]
    flat = take(body, "load_format", one_of(FLAT), None) is not None
    if flat:
        _require_aligned(tensors)
    return tensors, flat


def receive(
    tensors: list[Announced], group: ProcessGroup, device: torch.device, flat: bool
) -> list[tuple[str, torch.Tensor]]:
    """Receive one broadcast for each tensor, in this order, or with ``flat`` one with the bytes of
    all of them, without gaps.
    """
    return (_receive_flat if flat else _receive)(tensors, group, device)


def _receive(
    announced: list[Announced], group: ProcessGroup, device: torch.device
) -> list[tuple[str, torch.Tensor]]:
    tensors = [
        (one.name, torch.empty(one.shape, dtype=one.dtype, device=device)) for one in announced
    ]
    waits = [
        torch.distributed.broadcast(tensor, src=0, group=group, async_op=True)
        for _, tensor in tensors
    ]
    for wait in waits:
        wait.wait()
    return tensors


def _require_aligned(announced: list[Announced]) -> None:
    """Check that each tensor of a buffer without gaps starts at a multiple of its element size,
    which a view needs.
    """
    offset = 0
    for name, dtype, shape in announced:
        size = dtype.itemsize
        if offset % size:
            raise BadRequest(
                f"tensor {name!r} would start at byte {offset}, which is not a multiple of {size}"
            )
        offset += size * shape.numel()


def _receive_flat(
    announced: list[Announced], group: ProcessGroup, device: torch.device
) -> list[tuple[str, torch.Tensor]]:
    sizes = [one.nbytes for one in announced]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    torch.distributed.broadcast(flat, src=0, group=group)
    parts = zip(announced, flat.split(sizes), strict=True)
    return [(one.name, part.view(one.dtype).view(one.shape)) for one, part in parts]
