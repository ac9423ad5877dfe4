"""The index of a distributed checkpoint names tensors and nothing that could run code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from slime.backends.tensor_index import FILE, UnsafeMetadataError, require_tensors


class RunsCode:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.zeros(3, dtype=torch.bfloat16),
        "n": torch.tensor([3]),
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_what_torch_writes_for_tensors_passes(checkpoint: Path) -> None:
    require_tensors(checkpoint)


def test_an_index_that_would_run_code_is_refused(checkpoint: Path) -> None:
    target = checkpoint / "made by the file"
    metadata = pickle.loads((checkpoint / FILE).read_bytes())
    metadata.planner_data = RunsCode(target)
    (checkpoint / FILE).write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafeMetadataError, match=r"posix\.mkdir"):
        require_tensors(checkpoint)
    assert not target.exists()
    pickle.loads((checkpoint / FILE).read_bytes())
    assert target.exists()  # the file is as hostile as it should be


class TakesAttribute:
    def __init__(self, of: object, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> Any:
        return getattr, (self.of, self.name)


def test_attributes_are_members_of_enumerations_only(checkpoint: Path) -> None:
    """Some releases of Python, 3.11.2 among them, pickle a member as an attribute of its
    enumeration.
    """
    metadata = pickle.loads((checkpoint / FILE).read_bytes())
    metadata.planner_data = TakesAttribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    (checkpoint / FILE).write_bytes(pickle.dumps(metadata))
    require_tensors(checkpoint)
    for of, name in (
        (_MEM_FORMAT_ENCODING, "__init__"),
        (Metadata, "__init__"),
        ("text", "format"),
    ):
        metadata.planner_data = TakesAttribute(of, name)
        (checkpoint / FILE).write_bytes(pickle.dumps(metadata))
        with pytest.raises(UnsafeMetadataError, match=f"{name}"):
            require_tensors(checkpoint)


def test_entries_that_would_be_unpickled_are_refused(tmp_path: Path) -> None:
    dcp.save(
        {"a": torch.zeros(2), "model/x": {"any": "object"}, "y": 3},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    with pytest.raises(UnsafeMetadataError, match=r"unpickled: .*y"):
        require_tensors(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"cos\nsystem\n.", pickle.dumps({"a": 1})])
def test_damage_is_named(checkpoint: Path, content: bytes) -> None:
    (checkpoint / FILE).write_bytes(content)
    with pytest.raises(
        UnsafeMetadataError, match=r"\.metadata (cannot be read|could execute code)"
    ):
        require_tensors(checkpoint)
    (checkpoint / FILE).unlink()
    with pytest.raises(FileNotFoundError, match=r"\.metadata is missing"):
        require_tensors(checkpoint)
