"""Opens the buffers that ``/update_weights_from_tensor`` names; see :mod:`slime.engines.tensor_payload`.

Everything in such a request is data: JSON with the name of a shared memory file (CPU) or a CUDA IPC handle, and the
dtype, shape and place of each tensor. Nothing of it is unpickled or imported. A pickle, as SGLang takes it, would let
everyone who reaches the port run code.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

import torch

from slime.engines.embedded.protocol import BadRequest
from slime.engines.flat import Entry
from slime.engines.tensor_payload import HANDLES

_SHARED_MEMORY = Path("/dev/shm")
_FILE_NAME = re.compile(r"/torch_[0-9]+_[0-9]+_[0-9]+\Z")
_HEADER_BYTES = 64  # of torch before the data in a shared memory file
_MOST_DIMENSIONS = 16
_LARGEST = 2**48  # bytes, far beyond any buffer
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def read_tensors(body: Mapping[str, object]) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a body made by :func:`slime.engines.tensor_payload.handles` names, as views of its buffer.

    Raises:
        BadRequest: another form of body, or a handle that does not fit what it names.
    """
    if body.get("load_format") != HANDLES:
        raise BadRequest(
            f"load_format must be {HANDLES!r} with the fields buffer and tensors; the embedded engine takes no "
            "pickles (serialized_named_tensors), because unpickling a request runs code"
        )
    buffer, entries = body.get("buffer"), body.get("tensors")
    if not isinstance(buffer, dict):
        raise BadRequest("the field 'buffer' must be an object")
    if not isinstance(entries, list):
        raise BadRequest("the field 'tensors' must be a list of objects")
    nbytes = _number(buffer, "nbytes", "buffer")
    places = [_entry(entry, f"tensors[{index}]", nbytes) for index, entry in enumerate(entries)]
    openers = {"shared_memory": _open_shared_memory, "cuda_ipc": _open_cuda}
    kind = buffer.get("kind")
    if not isinstance(kind, str) or kind not in openers:
        raise BadRequest(f"buffer.kind must be one of {', '.join(openers)}, got {kind!r}")
    flat = openers[kind](buffer, nbytes)
    return [(place.name, _view(place, flat)) for place in places]


def _view(place: Entry, flat: torch.Tensor) -> torch.Tensor:
    part = flat[place.offset : place.offset + place.nbytes]
    if part.storage_offset() % DTYPES[place.dtype].itemsize:
        part = part.clone()  # a view of another dtype needs an aligned start
    return part.view(DTYPES[place.dtype]).reshape(place.shape)


def _entry(value: object, where: str, nbytes: int) -> Entry:
    """One tensor's description, checked against a buffer of ``nbytes`` bytes."""
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be an object")
    name, dtype, shape = value.get("name"), value.get("dtype"), value.get("shape")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.name must be the name of a tensor")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadRequest(f"{where}.dtype {dtype!r} is no dtype of torch")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise BadRequest(f"{where}.shape must be a list of at most {_MOST_DIMENSIONS} sizes")
    size = DTYPES[dtype].itemsize
    for axis in shape:
        if type(axis) is not int or not 0 <= axis < _LARGEST:
            raise BadRequest(f"{where}.shape holds {axis!r}, which is no size")
        size *= axis
    entry = Entry(name, dtype, tuple(shape), _number(value, "offset", where), _number(value, "nbytes", where))
    if entry.nbytes != size:
        raise BadRequest(f"{where}: {dtype} of shape {shape} has {size} bytes, nbytes says {entry.nbytes}")
    if entry.offset + entry.nbytes > nbytes:
        raise BadRequest(f"{where} ends at byte {entry.offset + entry.nbytes} of a buffer of {nbytes}")
    return entry


def _open_shared_memory(buffer: Mapping[str, object], nbytes: int) -> torch.Tensor:
    """A file of torch's that belongs to this user, mapped; it is counted down when the tensor goes."""
    manager, name = _text(buffer, "manager"), _text(buffer, "name")
    size, offset = _number(buffer, "storage_nbytes", "buffer"), _number(buffer, "offset", "buffer")
    if not _FILE_NAME.match(name):
        raise BadRequest(f"buffer.name {name!r} is no name of a shared memory file of torch")
    if offset + nbytes > size:
        raise BadRequest(f"buffer: {nbytes} bytes at {offset} do not fit into storage_nbytes {size}")
    try:
        file, service = os.lstat(_SHARED_MEMORY / name[1:]), os.stat(manager)
    except (OSError, ValueError) as error:
        raise BadRequest(f"buffer {name!r} cannot be opened: {error}") from error
    if not stat.S_ISREG(file.st_mode) or file.st_uid != os.geteuid() or file.st_size < size + _HEADER_BYTES:
        raise BadRequest(f"buffer.name {name!r} is no file of this user with {size} bytes")
    if not stat.S_ISSOCK(service.st_mode) or service.st_uid != os.geteuid():
        raise BadRequest("buffer.manager is no socket of this user")
    storage = torch.UntypedStorage._new_shared_filename_cpu(manager.encode(), name.encode(), size)
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (nbytes,), (1,))


def _open_cuda(buffer: Mapping[str, object], nbytes: int) -> torch.Tensor:
    """Memory of another process on a GPU that both see; torch checks the handle."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    device = _text(buffer, "device")
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if device not in seen:
        raise BadRequest(f"the tensors are on GPU {device}, this engine sees {', '.join(seen) or 'none'}")
    counter = _bytes(buffer, "ref_counter_handle")
    if not _FILE_NAME.match(counter.rstrip(b"\0").decode("ascii", "replace")):
        raise BadRequest("buffer.ref_counter_handle is no name of a shared memory file of torch")
    wait = buffer.get("event_sync_required")
    if not isinstance(wait, bool):
        raise BadRequest("buffer.event_sync_required must be true or false")
    tensor: torch.Tensor = rebuild_cuda_tensor(
        torch.Tensor,
        (nbytes,),
        (1,),
        _number(buffer, "offset", "buffer"),
        torch.storage.TypedStorage,
        torch.uint8,
        seen.index(device),
        _bytes(buffer, "handle"),
        _number(buffer, "storage_nbytes", "buffer"),
        _number(buffer, "storage_offset", "buffer"),
        False,
        counter,
        _number(buffer, "ref_counter_offset", "buffer"),
        _bytes(buffer, "event_handle"),
        wait,
    )
    return tensor


def _number(fields: Mapping[str, object], name: str, where: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise BadRequest(f"{where}.{name} must be a whole number of at least 0, got {value!r}")
    return value


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.isascii() or "\0" in value:
        raise BadRequest(f"buffer.{name} must be a string of ASCII characters")
    return value


def _bytes(fields: Mapping[str, object], name: str) -> bytes:
    try:
        return base64.b64decode(_text(fields, name), validate=True)
    except binascii.Error as error:
        raise BadRequest(f"buffer.{name} must be base64: {error}") from error
