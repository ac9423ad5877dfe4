"""Encode the factors of an adapter as the body of SGLang's ``/load_lora_adapter_from_tensors``."""

from __future__ import annotations

import base64
import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch

    from slime.engines.flat import Bucket


@dataclass(frozen=True)
class AdapterPayload:
    """The factors of one version of an adapter.

    The tensors are on the CPU, because SGLang keeps loaded adapters in host memory and copies them to its device when
    a batch needs them.

    Attributes:
        bucket: The factors by their names in PEFT's files.
        digests: The SHA-256 of each factor, which SGLang from 0.5.23 on compares before it loads them; None to
            compare nothing.
        shared: Whether the engines are on this host and open the factors in shared memory. Otherwise the body
            contains the values.
    """

    bucket: Bucket
    digests: Mapping[str, str] | None
    shared: bool

    def body(self, ranks: int, newest: bool) -> dict[str, object]:
        """Return the fields of the body that describe the tensors.

        Args:
            ranks: The number of tensor-parallel ranks of the engine, each of which cuts its part out of the factors.
            newest: Whether the server is SGLang 0.5.23 or later. It takes one copy for each rank, and digests;
                0.5.15 takes one copy for all ranks.
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
        from slime.engines.tensor_payload import entry

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
    """Return PEFT's configuration with the last parts of the names of the layers, which are all that SGLang compares.

    SGLang reads all names again for each factor. With the 252 whole names of an 8B model, this takes half of the time
    in which it loads an adapter.
    """
    names = cast("Sequence[str]", config["target_modules"])
    return {**config, "target_modules": sorted({name.rpartition(".")[2] for name in names})}


def adapter_payload(bucket: Bucket, digests: bool, memory: Callable[[int], torch.Tensor] | None) -> AdapterPayload:
    """Copy the factors to host memory, and compute their digests if these are wanted.

    Args:
        memory: Returns shared memory of a number of bytes, into which the factors are copied (see
            :func:`shared_memory`). None to copy them into memory of their own, because the engines are on other hosts.
    """
    import torch

    from slime.engines.flat import Bucket, flatten, layout

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

    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
