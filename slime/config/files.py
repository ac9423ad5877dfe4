"""Files that users name: whether a file can have the name, YAML, and the first row of a data file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

_LONGEST_NAME = 255  # bytes, of every file system in use


_LONGEST_PATH = 4095


_SLICE = re.compile(r"@\[(-?\d*):(-?\d*)\]$")


def path_problem(text: str) -> str | None:
    """Why no file can have this name; None where one can."""
    raw = text.encode(errors="surrogateescape")
    if "\0" in text:
        return "the name of a file cannot hold a NUL character"
    if len(raw) > _LONGEST_PATH or any(len(part) > _LONGEST_NAME for part in raw.split(b"/")):
        return f"the name of a file or folder has at most {_LONGEST_NAME} bytes, a path {_LONGEST_PATH}"
    try:
        Path(text).expanduser()
    except RuntimeError:
        return f"there is no home folder {text.partition('/')[0]}"
    return None


def load_yaml(file: Path) -> Any:
    """The content of a YAML file in UTF-8, with plain types only.

    Raises:
        ValueError: it is none.
        OSError: it cannot be read.
    """
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start}): save the file as UTF-8") from error
    except RecursionError:
        raise ValueError("not YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error


def read_yaml(path: str, option: str) -> tuple[dict[str, Any], list[str]]:
    """A flat mapping from a file, and what is wrong with it."""
    file = Path(path).expanduser()
    if not file.is_file():
        return {}, [f"{option} {path}: no such file"]
    try:
        content = load_yaml(file)
    except (ValueError, OSError) as error:
        return {}, [f"{option} {path}: {error}"]
    if content is None:
        return {}, []
    if not isinstance(content, dict):
        return {}, [f"{option} {path}: needs a mapping of flag names to values, not a {type(content).__name__}"]
    return content, []


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
