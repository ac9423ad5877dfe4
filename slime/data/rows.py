"""Rows of a JSONL or Parquet file, each with the place where it stands; bad rows are collected, not skipped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
SHOWN = 20


class DataError(ValueError):
    """A data set cannot be used. ``problems``: one line each, with file and row."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[DataError], tuple[list[str]]]:
        return type(self), (self.problems,)


class Problems:
    """Collects what is wrong; keeps the first :data:`SHOWN` and counts the rest."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.warnings: list[str] = []  # what may be as it should
        self.count = 0

    def add(self, problem: str) -> None:
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(problem)

    def lines(self) -> list[str]:
        more = self.count - len(self.shown)
        return [*self.shown, f"... and {more} more like these"] if more else self.shown

    def raise_if_any(self) -> None:
        if self.count:
            raise DataError(self.lines())


class Row(NamedTuple):
    where: str  # "file:line" or "file, row n"
    data: dict[str, Any]


def split_spec(spec: str) -> tuple[Path, slice]:
    """``path`` or ``path@[a:b]`` as the file and the slice of its rows.

    Raises:
        DataError: what follows the @ is no slice.
    """
    match = _SLICE.match(spec)
    if match:
        bounds = [int(match[g]) if match[g] not in ("", "-") else None for g in ("start", "stop")]
        if "-" not in (match["start"], match["stop"]):
            return Path(match["path"]).expanduser(), slice(*bounds)
    if "@[" in spec and not Path(spec).expanduser().exists():
        raise DataError([f"{spec}: a slice is written path@[start:stop], with whole numbers or nothing at either side"])
    return Path(spec).expanduser(), slice(None)


def read_rows(spec: str, problems: Problems) -> list[Row]:
    """All rows that ``spec`` selects.

    Malformed rows are added to ``problems``; blank lines of JSONL are no rows.

    Raises:
        DataError: no such file, an unknown type, or a file that cannot be read at all.
    """
    path, selected = split_spec(spec)
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise DataError([f"data file {path} {what} (looked for {path.absolute()})"])
    if path.suffix == ".jsonl":
        return list(_jsonl(path, selected, problems))
    if path.suffix == ".parquet":
        return list(_parquet(path, selected))
    raise DataError([f"{path}: unknown type {path.suffix!r}; data files are .jsonl or .parquet"])


def _jsonl(path: Path, selected: slice, problems: Problems) -> Iterator[Row]:
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for number, line in numbered[selected]:
        where = f"{path}:{number}"
        try:
            data = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            problems.add(f"{where}: not valid JSON: {_explain(error)}")
            continue
        if isinstance(data, dict):
            yield Row(where, data)
        else:
            problems.add(f"{where}: a row must be a JSON object, this is a {type(data).__name__}")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _explain(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start}"
    return str(error)


def _parquet(path: Path, selected: slice) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError([f"{path}: not a Parquet file: {error}"]) from error
    wanted = range(file.metadata.num_rows)[selected]
    number = 0
    for batch in file.iter_batches(batch_size=1024):
        keep = [i for i in range(batch.num_rows) if number + i in wanted]
        if keep:
            rows = batch.slice(keep[0], keep[-1] - keep[0] + 1).to_pylist()
            for i, data in zip(keep, rows, strict=True):
                yield Row(f"{path}, row {number + i + 1}", data)
        number += batch.num_rows
