"""Reads rows of a JSONL, Parquet or JSON file by number; each row knows its position in the file,
for messages.

A JSONL or Parquet file is never held in memory as a whole. :class:`RowFile` knows the number of
rows and reads those that are requested.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from slime.data.plain_values import MOST_NESTED, clean, no_constant, too_deep

_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_BOM = b"\xef\xbb\xbf"
SHOWN = 20
_FORMS = "(one object a line; a list of objects is .json)"


class DataError(ValueError):
    """A data set cannot be used; ``problems`` has one line for each problem, with file and row."""

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__(*problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class Problems:
    """Collects problems; keeps the first :data:`SHOWN` and counts the rest."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.warnings: list[str] = []  # findings that may be intended
        self.notices: list[str] = []  # how rows are read, where that is not plain
        self.count = 0

    def add(self, problem: str) -> None:
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(problem)

    def extend(self, other: Problems) -> None:
        for problem in other.shown:
            self.add(problem)
        self.count += other.count - len(other.shown)

    def lines(self) -> list[str]:
        more = self.count - len(self.shown)
        return [*self.shown, f"... and {more} more like these"] if more else self.shown

    def raise_if_any(self) -> None:
        if self.count:
            raise DataError(*self.lines())


class RawRow(NamedTuple):
    """A row as it is in the file: a line of JSON, or columns that the reader of the format has
    decoded.
    """

    where: str  # "file:line" or "file, row n" (from 1)
    content: bytes | dict[str, Any]
    # whether None stands for fields that an object does not have, as in Parquet
    filled: bool = False

    def decode(self) -> dict[str, Any]:
        """Decode the row.

        Raises:
            ValueError: The line is not a JSON object; the message does not contain the position.
        """
        # The reader of Parquet has decoded the row already.
        if isinstance(self.content, dict):
            return self.content
        try:
            data = json.loads(self.content, parse_constant=no_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {_explain(error)} {_FORMS}") from error
        if not isinstance(data, dict):
            raise ValueError(
                f"a row must be a JSON object, this is a {type(data).__name__} {_FORMS}"
            )
        check_values(data)
        return data


def check_values(data: object) -> None:
    """Refuse values that JSON can hold but a run cannot: deep nesting, since code that copies,
    renders or writes a row is recursive, and unpaired surrogates, which UTF-8 cannot encode.

    Raises:
        ValueError: The value has one of them.
    """
    if too_deep(data):
        raise ValueError(f"it nests more than {MOST_NESTED} objects and lists")
    if clean(data) != data:
        raise ValueError(
            r"its text has half of a surrogate pair (such as \ud83d without \ude00), which is not a character: "
            "write the row again with whole characters"
        )


class RowFile:
    """The rows that ``path`` or ``path@[a:b]`` selects. Blank lines of JSONL do not count as rows.

    Raises:
        DataError: The file does not exist, has an unknown type, or cannot be read.
    """

    def __init__(self, spec: str) -> None:
        path, selected = split_spec(spec)
        if not path.is_file():
            what = "is a folder, not a file" if path.is_dir() else "does not exist"
            hint = ""
            if not path.is_dir() and path.suffix not in _READERS:
                hint = (
                    f"; a data set of the hub is {path}:CONFIGURATION:SPLIT, mostly default:train"
                )
            elif any(file.suffix in _READERS for file in path.rglob("*.*")):
                hint = f"; {path}:default:train reads all of its data files"
            raise DataError(f"data file {path} {what} (looked for {path.absolute()}){hint}")
        if path.suffix not in _READERS:
            raise DataError(
                f"{path}: unknown type {path.suffix!r}; data files are .jsonl, .parquet or .json"
            )
        self.spec = spec
        self.path = path
        self._stat = self._identity()
        self.reader = _READERS[path.suffix](path)
        self._numbers = range(len(self.reader))[selected]

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, rows: Sequence[int]) -> list[RawRow]:
        """Read the rows with these numbers, in this order; each part of the file is read once.

        Raises:
            DataError: The file was changed after it was opened.
        """
        # Row numbers refer to the file as it was opened: in a changed file, they would be other
        # rows.
        if self._identity() != self._stat:
            raise DataError(
                f"{self.path} was changed while the run read it: start again, or restore the file"
            )
        # Readers only go forward, so the rows are read in ascending order and then put into the
        # requested order.
        numbers = [self._numbers[row] for row in rows]
        ascending = sorted(set(numbers))
        found = dict(zip(ascending, self.reader.ascending(ascending), strict=True))
        return [found[number] for number in numbers]

    def _identity(self) -> tuple[int, int]:
        stat = self.path.stat()
        return stat.st_size, stat.st_mtime_ns


def read_rows(spec: str) -> Iterator[dict[str, Any]]:
    """Yield the rows that ``path`` or ``path@[a:b]`` selects, as dicts.

    Raises:
        DataError: The file cannot be read, or a row is invalid; the message has the position.
    """
    file = RowFile(spec)
    for number in range(len(file)):
        (raw,) = file.read([number])
        try:
            yield raw.decode()
        except ValueError as error:
            raise DataError(f"{raw.where}: {error}") from error


def split_spec(spec: str) -> tuple[Path, slice]:
    """Split ``path`` or ``path@[a:b]`` into the file and the slice of its rows.

    Raises:
        DataError: The part after the @ is not a slice.
    """
    match = _SLICE.match(spec)
    if match:
        bounds = [int(match[g]) if match[g] not in ("", "-") else None for g in ("start", "stop")]
        if "-" not in (match["start"], match["stop"]):
            return Path(match["path"]).expanduser(), slice(*bounds)
    if "@[" in spec and not Path(spec).expanduser().exists():
        raise DataError(
            f"{spec}: a slice is written path@[start:stop], with whole numbers or nothing at "
            "either side"
        )
    return Path(spec).expanduser(), slice(None)


class _Reader(Protocol):
    def __init__(self, path: Path) -> None: ...

    def __len__(self) -> int: ...

    def ascending(self, rows: Sequence[int]) -> Iterator[RawRow]:
        """Read the rows with these numbers, which must be in ascending order."""


class _JsonLines:
    """Knows where the line of each row begins, and its number: 16 bytes for each row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offsets = array("Q")
        self.lines = array("Q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.startswith(_BOM):
                    offset = len(_BOM)
                    line = line.removeprefix(_BOM)
                if line and not line.isspace():
                    self.offsets.append(offset)
                    self.lines.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self.lines)

    def ascending(self, rows: Sequence[int]) -> Iterator[RawRow]:
        with self.path.open("rb") as file:
            for row in rows:
                file.seek(self.offsets[row])
                line = file.readline().rstrip(b"\n")
                yield RawRow(f"{self.path}:{self.lines[row]}", line)


class _Parquet:
    """Reads ascending rows batch by batch, and holds only the current batch of the current row
    group.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        try:
            self.file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path}: not a Parquet file: {error}") from error
        self.path = path
        meta = self.file.metadata
        sizes = (meta.row_group(i).num_rows for i in range(meta.num_row_groups))
        # first row of each row group, and the total
        self.starts = list(accumulate(sizes, initial=0))
        # the remaining batches of the row group that ends before `stop`
        self.batches: Iterator[Any] = iter(())
        self.batch: Any = ()
        self.first = self.stop = 0  # `first` is the row of self.batch[0]

    def __len__(self) -> int:
        return self.starts[-1]

    def ascending(self, rows: Sequence[int]) -> Iterator[RawRow]:
        from pyarrow import ArrowException

        for row in rows:
            try:
                self._go_to(row)
                (data,) = self.batch.slice(row - self.first, 1).to_pylist()
            except (ArrowException, OSError, ValueError, StopIteration) as error:
                words = str(error) or "it has fewer rows than its metadata says"
                raise DataError(f"{self.path}: damaged near row {row + 1}: {words}") from error
            yield RawRow(f"{self.path}, row {row + 1}", data, filled=True)

    def _go_to(self, row: int) -> None:
        # Another row group: read it from its beginning, batch by batch.
        if not self.first <= row < self.stop:
            group = bisect_right(self.starts, row) - 1
            self.first = self.starts[group]
            self.stop = self.starts[group + 1]
            self.batches = self.file.iter_batches(batch_size=1024, row_groups=[group])
            self.batch = ()
        while row >= self.first + len(self.batch):
            self.first += len(self.batch)
            self.batch = next(self.batches)


class _JsonList:
    """A file that is one list of objects. It cannot be read in parts, so it is held in memory."""

    def __init__(self, path: Path) -> None:
        try:
            rows = json.loads(path.read_bytes(), parse_constant=no_constant)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}: not valid JSON: {_explain(error)} (one object a line is .jsonl)"
            ) from error
        if not isinstance(rows, list):
            raise DataError(
                f"{path}: a .json file must be a list of objects, this is a {type(rows).__name__}"
            )
        self.path = path
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def ascending(self, rows: Sequence[int]) -> Iterator[RawRow]:
        for row in rows:
            # As text, so that RawRow.decode checks it, and tells its position.
            yield RawRow(f"{self.path}, row {row + 1}", json.dumps(self.rows[row]).encode())


_READERS: dict[str, type[_Reader]] = {
    ".jsonl": _JsonLines,
    ".parquet": _Parquet,
    ".json": _JsonList,
}


def _explain(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start}"
    return str(error)
