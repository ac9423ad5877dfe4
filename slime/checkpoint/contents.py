"""Read which classes and functions the pickles of a snapshot name, before a training rank reads
them.

The ranks refuse them as well, but only after the start, and each with its own words. Nothing is
executed here, and torch is not imported: every class is replaced by a plain one.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from slime.data.value_files import ALLOWED

_KNOWN = re.compile(
    r"torch\.(_utils\._rebuild_\w+|\w+Storage|storage\.\w+Storage|Size|device|dtype|serialization\._get_layout|bfloat16"
    r"|u?int\d+|float\d\w*|bool|complex\d+|distributed\.checkpoint\.(metadata|filesystem|planner|_fsspec_filesystem)\.\w+)"
    r"|collections\.(OrderedDict|defaultdict|Counter)|builtins\.(getattr|set|dict|list|tuple|complex|bytearray|int|float)"
    r"|copyreg\._reconstructor|builtins\.object|numpy\.dtypes?\.?\w*|pathlib\._local\.\w+"
)
_HEAD = 2**16
_FSDP = "dcp"
"""The folder of the tensors of the FSDP backend."""


class _Named(ValueError):
    """A pickle names a class or a function that no snapshot of slime has."""


class _Value:
    """Stands for an object of any class."""

    def __init__(self, *_: object) -> None:
        pass

    def __setitem__(self, name: object, value: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def append(self, value: object) -> None:
        pass

    extend = add = append


def _member(_: object, name: str) -> _Value:
    """Stands for ``getattr``, with which some releases of Python pickle members of enumerations."""
    if not name.isupper():
        raise _Named(f"it takes the attribute {name}")
    return _Value()


class _Reader(pickle.Unpickler):
    def __init__(self, packed: BinaryIO, only_tensors: bool) -> None:
        super().__init__(packed)
        self.only_tensors = only_tensors

    def find_class(self, module: str, name: str) -> Any:
        # The entry of an index that stands for a pickle in another file; slime writes none.
        unknown = f"{module}.{name}" not in ALLOWED and not _KNOWN.fullmatch(f"{module}.{name}")
        if unknown or (self.only_tensors and name == "BytesStorageMetadata"):
            raise _Named(f"it names {module}.{name}")
        return _member if name == "getattr" else _Value

    def persistent_load(self, pid: object) -> Any:
        return _Value()


def hostile_file(snapshot: Path, own_classes: bool = False) -> str | None:
    """Return a line about the first file of a snapshot whose pickle names anything but values; None
    if there is none.

    Args:
        own_classes: Whether the user's functions may have allowed classes for the state of the
            rollouts, so that only the files of the training ranks are read.
    """
    # Sorted, so that the same file is named each time.
    for file in sorted(snapshot.rglob("*")):
        if not file.is_file() or (
            own_classes and file.relative_to(snapshot).parts[0] not in ("actor", "critic")
        ):
            continue
        try:
            for packed in _pickles(file):
                _Reader(packed, file.parent.name == _FSDP).load()
        except _Named as error:
            return (
                f"{file} could execute code ({error}), so it is not loaded: use the original "
                "snapshot"
            )
        except Exception as error:  # a damaged pickle may raise any exception
            why = " ".join(f"{type(error).__name__}: {error}".split())
            return f"{file} cannot be read ({why}): use the original snapshot"
    return None


def _pickles(file: Path) -> Iterator[BinaryIO]:
    # Three formats of torch: the index of a distributed checkpoint, a zip archive, and tensors one
    # after the other.
    if file.name == ".metadata":
        yield io.BytesIO(file.read_bytes())
    elif file.suffix == ".pt":
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.endswith("/data.pkl"):
                    yield io.BytesIO(archive.read(name))
    elif file.suffix == ".distcp" and os.path.getsize(file) > 0:
        with file.open("rb") as opened:
            head = opened.read(_HEAD)
        if head[:4] != b"PK\x03\x04" and file.parent.name == _FSDP:
            raise ValueError("it does not begin with a tensor")
        # the first tensor of the file, whose first entry is its pickle
        if head[:4] == b"PK\x03\x04":
            start = (
                30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            )
            yield io.BytesIO(head[start:])
