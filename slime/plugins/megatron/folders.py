"""How a checkpoint is found in a folder that Megatron-LM wrote with ``--ckpt-format torch_dist``.

Such a folder has a tracker file and a folder per iteration::

    X/latest_checkpointed_iteration.txt      "100", or "release" for converted weights
    X/iter_0000100/.metadata, *.distcp, common.pt, metadata.json
    X/release/...
"""

from __future__ import annotations

from pathlib import Path

_TRACKER = "latest_checkpointed_iteration.txt"
_OF_SLIME = ("manifest.json", "trainer.json", "actor")


def folder_of(path: str, step: int | None) -> Path | None:
    """Return the folder of a checkpoint of Megatron-LM whose weights can be read; None if there is
    none.

    Args:
        path: The folder with the tracker file, or the folder of one iteration (``.metadata`` and
            ``*.distcp``).
        step: The iteration to select. Default: that of the tracker file, or the newest one if there
            is no such file.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        return None
    if _is_readable(folder):
        return folder
    return next((chosen for chosen in _candidates(folder, step) if _is_readable(chosen)), None)


def _candidates(folder: Path, step: int | None) -> list[Path]:
    if step is not None:
        return [folder / f"iter_{step:07d}"]
    tracker = folder / _TRACKER
    named = tracker.read_text(errors="replace").strip() if tracker.is_file() else None
    if named is None:
        return [*sorted(folder.glob("iter_*"), reverse=True), folder / "release"]
    return [folder / (f"iter_{int(named):07d}" if named.isdecimal() else "release")]


def _is_readable(folder: Path) -> bool:
    """Whether a folder has an index and tensors of ``torch_dist``, and slime did not write it."""
    if any((folder / name).exists() for name in _OF_SLIME) or not (folder / ".metadata").is_file():
        return False
    return next(folder.glob("*.distcp"), None) is not None
