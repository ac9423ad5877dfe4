"""Extra state beside the weights: plain values in a ``torch.save`` file.

The data source's state lies in a snapshot at ``rollout/global_dataset_state_dict_<id>.pt``;
:func:`slime.checkpoint.snapshot.commit` also publishes a copy at the documented path
``<save>/rollout/global_dataset_state_dict_<id>.pt``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.checkpoint.files import write_atomically
from slime.data.plain_files import load_plain, plain


def write_state(path: Path, state: Any) -> None:
    """Write ``state`` so that ``torch.load(path)`` reads it; never visible half-written."""
    import torch

    write_atomically(path, lambda file: torch.save(plain(state), file))


def read_state(path: Path) -> Any:
    """Read what :func:`write_state` wrote; nothing in the file is run (:mod:`slime.data.plain_files`).

    Raises:
        FileNotFoundError: there is no such file.
        UnsafeFileError: it holds something else than plain values.
    """
    if not path.is_file():
        present = ", ".join(sorted(p.name for p in path.parent.iterdir())) if path.parent.is_dir() else "no such folder"
        raise FileNotFoundError(f"state file {path} is missing (there: {present or 'nothing'})")
    return load_plain(path)
