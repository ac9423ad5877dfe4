"""One picklable value in one file that is either whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def write_state(path: Path, state: Any) -> None:
    """Write ``state`` (plain containers, numbers, numpy arrays, tensors) with ``torch.save``, aside first."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    with aside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def read_state(path: Path) -> Any:
    """Read what :func:`write_state` wrote. Raises FileNotFoundError naming the file."""
    import torch

    if not path.is_file():
        raise FileNotFoundError(f"the snapshot has no {path.name} in {path.parent}: it was not written by this version")
    return torch.load(path, map_location="cpu", weights_only=False)
