"""The first row of a data file: enough to choose defaults; rows are checked in the data room."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_SLICE = re.compile(r"@\[(-?\d*):(-?\d*)\]$")


def file_of(prompt_data: str) -> Path:
    """The file of ``path`` or ``path@[a:b]``."""
    return Path(_SLICE.sub("", prompt_data)).expanduser()


def first_row(prompt_data: str) -> dict[str, Any] | None:
    """The first row of a JSONL, Parquet or JSON file, or None when it cannot be read (the data room says why)."""
    file = file_of(prompt_data)
    try:
        return _first_row(file) if file.is_file() else None
    except OSError:
        return None


def _first_row(file: Path) -> dict[str, Any] | None:
    if file.suffix == ".parquet":
        return _first_parquet_row(file)
    if file.suffix == ".json":
        return _first_listed_row(file)
    with file.open(encoding="utf-8", errors="replace") as lines:
        line = next((line for line in lines if line.strip()), "")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _first_listed_row(file: Path) -> dict[str, Any] | None:
    try:
        rows = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None
    return rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else None


def _first_parquet_row(file: Path) -> dict[str, Any] | None:
    import pyarrow.parquet as parquet
    from pyarrow.lib import ArrowException

    try:
        batch = next(parquet.ParquetFile(file).iter_batches(batch_size=1), None)
        rows: list[dict[str, Any]] = batch.to_pylist() if batch is not None else []
    except (ArrowException, OSError, ValueError):  # Arrow raises these of its own types, and plain ones
        return None
    return rows[0] if rows else None
