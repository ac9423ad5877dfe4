"""A folder for snapshots is tried out before a run starts, and pickles, which somebody else may have
made, are read before anything starts.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from needs import fill, small_disk

from slime.backends.saving import small_files_writer
from slime.backends.tensor_shards import TensorShard, write_shards
from slime.checkpoint.files import (
    MIB,
    MOST_SECONDS,
    Answer,
    FolderError,
    FolderTrial,
    answer,
    hostile_file,
    is_full,
    try_to_write,
    wait_for_room,
)
from slime.data.plain_values import write_state
from slime.models.stored import write_tensors


def test_a_good_folder_is_left_as_it_was(tmp_path: Path) -> None:
    assert try_to_write(tmp_path) is None
    assert try_to_write(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "written on" in str(try_to_write(tmp_path / "file" / "save"))
    assert "written on" in str(try_to_write(Path("/proc/slime/save")))
    with pytest.raises(FolderError, match="--save"), FolderTrial(tmp_path / "file"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_without_room_is_said(tmp_path: Path) -> None:
    assert "1048576.0 GiB" in str(try_to_write(tmp_path / "a", 2**50))
    assert not (tmp_path / "a").exists()


def test_one_folder_for_all_passes_and_leaves_nothing(tmp_path: Path) -> None:
    with FolderTrial(tmp_path / "save") as trial:
        answers = {
            who: answer(str(trial.folder), trial.token, who)
            for who in ("actor rank 0", "actor rank 1")
        }
        trial.check(answers)
    assert list((tmp_path / "save").iterdir()) == []


def test_folders_that_are_not_shared_are_named_with_their_hosts(tmp_path: Path) -> None:
    """Another node's folder of the same name: here another folder, empty or with the same file
    copied into it.
    """
    elsewhere = tmp_path / "other node"
    with FolderTrial(tmp_path / "save") as trial:
        near = answer(str(trial.folder), trial.token, "actor rank 0")
        absent = answer(str(elsewhere), trial.token, "actor rank 1")
        elsewhere.mkdir()
        empty = answer(str(elsewhere), trial.token, "actor rank 1")
        assert near.error is None and near.host == os.uname().nodename
        assert absent.error is not None and empty.error == "the driver's file is not there"
        with pytest.raises(FolderError, match="rank 1") as caught:
            trial.check({"actor rank 0": near, "actor rank 1": empty._replace(host="node-b")})
        assert "actor rank 0" not in str(caught.value) and "node mounts" in str(caught.value)
        with pytest.raises(FolderError, match="rank 2"):
            trial.check({"actor rank 2": Answer("node-c", None)})
    assert list((tmp_path / "save").iterdir()) == []


# 2 MiB: more than any buffer between torch and the disk
LARGE = torch.arange(2**19, dtype=torch.float32)


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(28, "No space left on device"), True),
        (RuntimeError("/data/dcp: rank 3: [Errno 28] No space left on device"), True),
        (OSError(122, "Disk quota exceeded"), True),
        (PermissionError(13, "Permission denied"), False),
    ],
)
def test_what_counts_as_a_full_disk(error: Exception, full: bool) -> None:
    assert is_full(error) is full


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_shards([TensorShard("a", LARGE, (0,), LARGE.shape)], folder, folder),
        lambda folder: write_state(folder / "state.pt", {"a": LARGE}),
        lambda folder: small_files_writer(folder, 0, {"cpu": LARGE}, None)(),
        lambda folder: write_tensors([("a", LARGE)], folder, True),
    ],
    ids=["tensors of a snapshot", "state of the rollouts", "random state", "export"],
)
def test_a_full_disk_is_recognized_whoever_writes(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    """A real one. torch raises "unexpected pos 704 vs 598" there."""
    with small_disk(tmp_path / "disk", mib=4) as disk:
        ballast = fill(disk, free=1)
        with pytest.raises(Exception) as raised:
            write(disk)
        assert is_full(raised.value), raised.value
        ballast.unlink()
        write(disk)


@pytest.mark.parametrize(("grows_at", "ends_at"), [(7.0, 7.0), (0.5, 1.0), (None, MOST_SECONDS)])
def test_a_wait_ends_when_there_is_room_or_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows_at: float | None, ends_at: float
) -> None:
    now = [0.0]

    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=5 * MIB if grows_at is not None and now[0] >= grows_at else MIB)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(shutil, "disk_usage", usage)
    wait_for_room(tmp_path, lambda: None, lambda: now[0], sleep)
    assert now[0] == ends_at


def test_a_signal_ends_the_wait(tmp_path: Path) -> None:
    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_for_room(tmp_path, check)


class Runs:
    """Unpickling it would create a file."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.made}",)


class Takes:
    def __reduce__(self) -> Any:
        return getattr, (torch.Size, "__subclasses__")


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    folder = tmp_path / "iter_0000001"
    dcp.save(
        {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.bfloat16)},
        checkpoint_id=folder / "actor" / "dcp",
    )
    torch.save(
        {"python": (3, (1, 2), None), "torch": torch.get_rng_state()}, folder / "actor" / "rng_0.pt"
    )
    write_state(
        folder / "rollout" / "global_dataset_state_dict_1.pt",
        {"epoch": 1, "samples": [{"tokens": [1, 2]}]},
    )
    (folder / "manifest.json").write_text("{}")
    return folder


def test_a_snapshot_of_values_is_sound(snapshot: Path) -> None:
    assert hostile_file(snapshot) is None


@pytest.mark.parametrize(
    "name", ["dcp/.metadata", "rng_0.pt", "../rollout/state.pt", "dcp/__0_0.distcp"]
)
@pytest.mark.parametrize("kind", ["function", "attribute", "damaged", "plain pickle"])
def test_a_pickle_that_could_run_code_is_named_in_one_line(
    snapshot: Path, name: str, kind: str
) -> None:
    made = snapshot.parent / "made"
    file = (snapshot / "actor" / name).resolve()
    value: object = Takes() if kind == "attribute" else Runs(made)
    if name.endswith(".metadata") or kind == "plain pickle":
        packed = pickle.dumps(value)
    else:
        saved = io.BytesIO()
        torch.save({"x": value}, saved)
        packed = saved.getvalue()
    file.write_bytes(packed[: len(packed) // 3] if kind == "damaged" else packed)
    said = hostile_file(snapshot)
    assert said is not None and str(file) in said and "\n" not in said
    assert not made.exists()


def test_an_index_with_bytes_is_refused(snapshot: Path) -> None:
    dcp.save({"a": torch.ones(3), "b": [1, 2]}, checkpoint_id=snapshot / "actor" / "dcp")
    assert "BytesStorageMetadata" in str(hostile_file(snapshot))


def test_classes_that_a_function_of_the_user_allows_are_left_to_it(snapshot: Path) -> None:
    torch.save({"x": io.BytesIO(b"1")}, snapshot / "rollout" / "state.pt")
    assert (
        "_io.BytesIO" in str(hostile_file(snapshot))
        and hostile_file(snapshot, own_classes=True) is None
    )
