"""What ``--load`` names: a snapshot to resume from, or only weights."""

from __future__ import annotations

from pathlib import Path

from slime.checkpoint.snapshot import Snapshot, latest, snapshots
from slime.config.checkpoint import megatron_lm_folder


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


def snapshots_of(save: Path) -> list[Path]:
    """Return the folders of the snapshots in ``--save``, the one that was committed last at the end."""
    return [one.path for one in sorted(snapshots(save), key=lambda one: one.manifest["sequence"])]
