"""What the driver finds wrong before a process starts."""

from __future__ import annotations

from pathlib import Path

from slime.checkpoint import snapshot
from slime.cluster.checks import _check_snapshots
from slime.config.args import Args


def test_a_folder_with_checkpoints_of_another_program_is_named_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "iter_0000100").mkdir()
    (tmp_path / snapshot.TRACKER).write_text("100")
    args = Args()
    assert _check_snapshots(args) == []
    args.load = args.save = str(tmp_path)
    saving, loading = _check_snapshots(args)
    assert saving.startswith(f"--save {tmp_path} holds checkpoints that slime did not write (iter_0000100/")
    assert loading.startswith(f"--load {tmp_path} holds") and "convert_torch_dist_to_hf.py" in loading


def test_a_missing_iteration_and_a_damaged_snapshot_are_named_before_the_start(tmp_path: Path) -> None:
    temp = snapshot.begin(tmp_path, 3)
    (temp / "a").write_bytes(b"abc")
    path = snapshot.commit(temp, {"rollout_id": 3})
    args = Args()
    args.load = args.save = str(tmp_path)
    assert _check_snapshots(args) == []
    args.ckpt_step = 4
    assert "has no snapshot of iteration 4" in _check_snapshots(args)[0]
    args.ckpt_step = 3
    (path / "a").write_bytes(b"ab")
    assert "a has 2 bytes instead of 3" in _check_snapshots(args)[0]
