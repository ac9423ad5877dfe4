"""What ``--load`` names: a snapshot to resume from, or only weights."""

from __future__ import annotations

from pathlib import Path

from slime.checkpoint.snapshot import Snapshot, latest
from slime.config.megatron_checkpoint import megatron_lm_folder


def snapshot_of(load: str | None, step: int | None, digests: bool = True) -> Snapshot | None:
    """Return the snapshot that ``--load`` names; None if it names weights, also those of Megatron-LM.

    Args:
        step, digests: As for :func:`slime.checkpoint.snapshot.latest`.

    Raises:
        SnapshotError: As :func:`slime.checkpoint.snapshot.latest`.
    """
    if load is None or megatron_lm_folder(load, step):
        return None
    return latest(Path(load).expanduser(), step, digests)
