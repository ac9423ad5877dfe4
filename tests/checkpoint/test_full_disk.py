"""What counts as a full disk, and when a wait for room ends."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.checkpoint.full_disk import MIB, MOST_SECONDS, is_full, wait_for_room


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
