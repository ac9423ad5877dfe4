"""A folder for snapshots is tried out before a run starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slime.checkpoint.shared_folder import Answer, FolderError, FolderTrial, answer, try_to_write


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
        answers = {who: answer(str(trial.folder), trial.token, who) for who in ("actor rank 0", "actor rank 1")}
        trial.check(answers)
    assert list((tmp_path / "save").iterdir()) == []


def test_folders_that_are_not_shared_are_named_with_their_hosts(tmp_path: Path) -> None:
    """Another node's folder of the same name: here another folder, empty or with the same file copied into it."""
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
