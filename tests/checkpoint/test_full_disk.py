"""What counts as a full disk, and when a wait for room ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from needs import fill, small_disk

from slime.backends.saving import small_files_writer
from slime.backends.tensor_shards import TensorShard, write_shards
from slime.checkpoint.full_disk import MIB, MOST_SECONDS, is_full, wait_for_room
from slime.data.value_files import write_state
from slime.models.stored import write_tensors

LARGE = torch.arange(2**19, dtype=torch.float32)  # 2 MiB: more than any buffer between torch and the disk


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
def test_a_full_disk_is_recognized_whoever_writes(tmp_path: Path, write: Callable[[Path], object]) -> None:
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
