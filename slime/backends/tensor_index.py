"""The index of the tensors that a training backend has saved with ``torch.distributed.checkpoint``.

The tensors of such a checkpoint are read without executing code. But its index is a pickle, and an
entry may consist of bytes that are unpickled too. So :func:`require_tensors` checks the index
before torch unpickles it: a checkpoint of unknown origin could execute code when it is loaded.
"""

from __future__ import annotations

import enum
import io
import pickle
from pathlib import Path
from typing import Any

import torch

META = "trainer.json"
"""The file beside the tensors that says which backend wrote them, for which role and model."""
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
    # megatron-core stores its plans in the index
    "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
})  # fmt: skip
_OTHERS = frozenset({
    ("pathlib", "PosixPath"), ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
})  # fmt: skip


class UnsafeMetadataError(ValueError):
    """The index of a checkpoint contains something that it does not need. The message names it."""


def _member(of: object, name: str) -> enum.Enum:
    """Return a member of an enumeration, and refuse every other attribute."""
    if not (isinstance(of, type) and issubclass(of, enum.Enum) and name in of.__members__):
        raise UnsafeMetadataError(f"it takes the attribute {name} of {of!r}")
    return of[name]


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Python 3.11.2, for one, pickles members of enumerations so
        if (module, name) == ("builtins", "getattr"):
            return _member
        known = (module in _MODULES and name in _CLASSES) or (module, name) in _OTHERS
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not known and not is_dtype:
            raise UnsafeMetadataError(f"it names {module}.{name}")
        return super().find_class(module, name)


def require_tensors(folder: Path, only: bool = True) -> None:
    """Refuse a checkpoint whose index contains anything other than tensors and their places. No
    code is executed.

    Args:
        only: Also refuse entries of bytes, which :func:`torch.distributed.checkpoint.load` would
            unpickle. Pass False if the caller reads tensors by name and never such an entry
            (Megatron-LM stores extra states like this).

    Raises:
        UnsafeMetadataError: The index contains something else, or is damaged.
        FileNotFoundError: There is no index.
    """
    file = folder / FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not a distributed checkpoint: {FILE} is missing")
    try:
        metadata = _Reader(io.BytesIO(file.read_bytes())).load()
        entries = dict(metadata.state_dict_metadata)
    except UnsafeMetadataError as error:
        raise UnsafeMetadataError(
            f"{file} could execute code ({error}); it was not loaded. Use the original"
        ) from None
    except Exception as error:  # a damaged pickle may raise any exception
        raise UnsafeMetadataError(
            f"{file} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not only:
        return
    of_bytes = sorted(
        name for name, entry in entries.items() if type(entry).__name__ != "TensorStorageMetadata"
    )
    if of_bytes:
        raise UnsafeMetadataError(
            f"{file} was not loaded, because it has entries that are not tensors and would be "
            f"unpickled: {', '.join(of_bytes[:3])}. slime writes no such entries"
        )
