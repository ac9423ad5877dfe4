"""The ``.metadata`` file of torch's distributed checkpoints, looked at before torch unpickles it.

The tensors of such a checkpoint are read without running code, but its index is a pickle, and an entry may be of bytes
that are unpickled again. A snapshot from somebody else could so run code when it is loaded.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

FILE = ".metadata"
_MODULES = frozenset({
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint._fsspec_filesystem",
})  # fmt: skip
_CLASSES = frozenset({
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
    "TensorStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo",
    "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",  # megatron-core keeps its plans
})  # fmt: skip
_OTHERS = frozenset({
    ("pathlib", "PosixPath"), ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
})  # fmt: skip


class UnsafeMetadataError(ValueError):
    """A checkpoint's index asks for something that it has no need of; the message names it."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module in _MODULES and name in _CLASSES) or (module, name) in _OTHERS
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not known and not is_dtype:
            raise UnsafeMetadataError(f"it names {module}.{name}")
        return super().find_class(module, name)


def require_tensors(folder: Path) -> None:
    """Refuse a checkpoint whose index names anything but tensors and where they lie.

    Raises:
        UnsafeMetadataError: it does, or is no such file. Nothing of it was run.
        FileNotFoundError: there is no index.
    """
    file = folder / FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is no distributed checkpoint: {FILE} is missing")
    try:
        metadata = _Reader(io.BytesIO(file.read_bytes())).load()
        entries = dict(metadata.state_dict_metadata)
    except UnsafeMetadataError as error:
        raise UnsafeMetadataError(f"{file} could run code: {error}. It was not loaded; take the original") from None
    except Exception as error:  # a damaged pickle raises anything
        raise UnsafeMetadataError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    of_bytes = sorted(name for name, entry in entries.items() if type(entry).__name__ != "TensorStorageMetadata")
    if of_bytes:
        raise UnsafeMetadataError(
            f"{file} has entries that are no tensors and would be unpickled: {', '.join(of_bytes[:3])}. slime writes "
            "none; it was not loaded"
        )
