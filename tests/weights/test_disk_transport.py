"""A version on disk is checked before an engine reads any of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slime.engines.payload import Bucket
from slime.models.shards import INDEX, ModelError
from slime.weights.transports.disk import require_whole, write_index, write_shard

NAMES = {"a", "b", "c"}


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version of two files: ``a`` and ``b`` in the first, ``c`` in the second."""
    files = write_shard(tmp_path, Bucket(0, [("a", torch.ones(64)), ("b", torch.ones(64))]))
    files |= write_shard(tmp_path, Bucket(1, [("c", torch.ones(64))]))
    write_index(tmp_path, files, 768)
    return tmp_path


def cut_short(folder: Path) -> None:
    file = folder / "model-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def cut_to_nothing(folder: Path) -> None:
    (folder / "model-00002.safetensors").write_bytes(b"")


def remove_a_file(folder: Path) -> None:
    (folder / "model-00002.safetensors").unlink()


def leave_out_a_tensor(folder: Path) -> None:
    """As a hook that writes a file anew (``--custom-update-weight-post-write-path``)."""
    files = write_shard(folder, Bucket(0, [("a", torch.ones(64))])) | {
        "c": "model-00002.safetensors"
    }
    write_index(folder, files, 512)


def cut_the_index(folder: Path) -> None:
    (folder / INDEX).write_text((folder / INDEX).read_text()[:20])


def test_a_whole_version_passes(version: Path) -> None:
    require_whole(version, NAMES)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (cut_short, "model-00002.safetensors"),
        (cut_to_nothing, "model-00002.safetensors"),
        (remove_a_file, "model-00002.safetensors"),
        (leave_out_a_tensor, "it: b"),
        (cut_the_index, INDEX),
    ],
)
def test_what_is_damaged_or_missing_is_named(
    version: Path, damage: Callable[[Path], None], named: str
) -> None:
    damage(version)
    with pytest.raises(ModelError, match=named):
        require_whole(version, NAMES)
