"""Data sets by name: ``--prompt-data openai/gsm8k:main:train`` becomes a file that the package
``datasets`` provided.

The name is ``ORGANIZATION/NAME:CONFIGURATION:SPLIT``, as ``datasets.load_dataset`` takes it;
instead of a name, the path of a folder that it can load is possible. ``datasets.json`` has
the columns, and the default configuration and split, of the best-known sets. The rows are written
once to a file of slime's cache, with the columns ``prompt``, ``label`` and ``metadata`` besides
their own. From there on a run knows only the file, so the order of its rows, and a resume, do not
depend on the hub.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.config.files import NamedDataError, read_json
from slime.config.machine import cache_folder
from slime.registry import register

_NAME = re.compile(
    r"^(?P<path>[^:@]*[^:@/])(?::(?P<first>[\w.-]+))?(?::(?P<second>[\w.+-]+(?:\[[^\]@]*\])?))?(?P<slice>@\[-?\d*:-?\d*\])?$"
)
_OF_HUB = re.compile(r"^[\w.-]+/[\w.-]+$")
_FILES = (".jsonl", ".parquet", ".json")
_USUAL_SPLITS = ("train", "test", "validation", "dev")


@dataclass(frozen=True)
class DataName:
    """A parsed name. ``rows`` is ``@[a:b]`` or empty."""

    path: str
    config: str | None
    split: str | None
    rows: str

    def file(self) -> str:
        """Return the file of the rows, with the slice of them.

        Raises:
            NamedDataError: As :func:`file_of_name`.
        """
        return f"{file_of_name(self)}{self.rows}"

    @property
    def reward_type(self) -> str | None:
        """The usual ``--rm-type``, if the set is known."""
        return known_sets().get(self.path, {}).get("rm_type")


def known_sets() -> dict[str, dict[str, Any]]:
    """The table of known data sets by name."""
    table: dict[str, dict[str, Any]] = read_json(Path(__file__).parent / "datasets.json")
    return table


def data_name(text: str) -> DataName | None:
    """Parse a value of ``--prompt-data``; None if it is the path of a file, whether it exists or
    not.
    """
    match = _NAME.match(text)
    if match is None or Path(match["path"]).suffix in _FILES or Path(text).expanduser().is_file():
        return None
    # A typing error in the path of a file must not become a request to the hub.
    folder = Path(match["path"]).expanduser().is_dir()
    if not folder and not (
        _OF_HUB.match(match["path"]) and (match["first"] or match["path"] in known_sets())
    ):
        return None
    if folder and not match["first"] and match["path"] not in known_sets():
        return None  # a folder without a split is reported as a path that is not a file
    known = known_sets().get(match["path"], {})
    first = match["first"]
    second = match["second"]
    # gsm8k:train names a split, gsm8k:main a configuration.
    if first and not second and (first in _USUAL_SPLITS or first == known.get("split")):
        first, second = None, first
    return DataName(
        match["path"],
        first or known.get("config"),
        second or known.get("split"),
        match["slice"] or "",
    )


@functools.cache
def file_of_name(name: DataName) -> Path:
    """Return the file with the rows of a data set, which is written if it does not exist.

    Raises:
        NamedDataError: The package is missing, the data set cannot be loaded, or it lacks a column
            of the table.
    """
    columns = known_sets().get(name.path, {})
    # Another version of the table, or of a local folder, gives another file. So rows never change
    # under a run.
    key = json.dumps(
        [name.path, name.config, name.split, columns, _folder_state(name.path)], sort_keys=True
    )
    plain = re.sub(
        r"[^\w.-]+", "--", f"{Path(name.path).name}-{name.config or ''}-{name.split or ''}"
    ).strip("-")
    file = (
        cache_folder("datasets")
        / f"{plain}-{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}.jsonl"
    )
    if not file.is_file():
        with tempfile.TemporaryDirectory(prefix="slime-datasets-") as aside:
            write_rows(file, _load(name, aside), columns, name)
    return file


def _folder_state(path: str) -> list[Any]:
    """The names, sizes and times of a local folder's files, so that a changed folder is read
    again.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return []
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [
        str(folder.resolve()),
        *([str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns] for f in files),
    ]


def _load(name: DataName, aside: str) -> Any:
    """Load the rows. Those of a local folder are prepared in the folder ``aside``, because the
    cache of ``datasets`` does not see every change of a local file."""
    try:
        import datasets
    except ImportError as error:
        raise NamedDataError(
            f"data sets by name need the package datasets ({error}): pip install "
            "'slime-rl[datasets]', or pass a file"
        ) from error
    folder = Path(name.path).expanduser()
    try:
        # What save_to_disk wrote has a format of its own.
        if folder.is_dir() and any(
            (folder / mark).is_file() for mark in ("dataset_dict.json", "state.json")
        ):
            found = datasets.load_from_disk(str(folder))
            return found[name.split] if isinstance(found, datasets.DatasetDict) else found
        split = name.split or _only_split(datasets, name)
        if folder.is_dir():
            return datasets.load_dataset(str(folder), name.config, split=split, cache_dir=aside)
        return datasets.load_dataset(name.path, name.config, split=split)
    except NamedDataError:
        raise
    except (ConnectionError, OSError) as error:
        raise NamedDataError(_unreachable(name, error)) from error
    except Exception as error:  # The package and its readers of formats raise what they like.
        if (
            "offline" in f"{type(error).__name__}{error}".lower()
            or "connection" in str(error).lower()
        ):
            raise NamedDataError(_unreachable(name, error)) from error
        cause = f" ({_line(error.__cause__)})" if error.__cause__ else ""
        raise NamedDataError(
            f"datasets cannot load it: {type(error).__name__}: {_line(error)}{cause}"
        ) from error


def _only_split(datasets: Any, name: DataName) -> str:
    folder = Path(name.path).expanduser()
    splits = datasets.get_dataset_split_names(
        str(folder) if folder.is_dir() else name.path, name.config
    )
    if len(splits) != 1:
        raise NamedDataError(
            f"it has the splits {', '.join(splits)}: name one, as in "
            f"{name.path}:CONFIGURATION:SPLIT"
        )
    return str(splits[0])


def _unreachable(name: DataName, error: Exception) -> str:
    return (
        f"the hub cannot be reached or does not have it ({type(error).__name__}: {_line(error)}). "
        f"Where there is a network, run hf download --repo-type dataset {name.path} --local-dir "
        "FOLDER, and pass the folder here, as in "
        f"FOLDER:{name.config or 'default'}:{name.split or 'train'}"
    )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def write_rows(
    file: Path, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Any], name: DataName
) -> None:
    """Write the rows with the columns that the table maps, aside first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Another run may read the file at the same time.
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as lines:
            for number, row in enumerate(rows, 1):
                try:
                    lines.write(
                        json.dumps(mapped(row, columns), ensure_ascii=False, default=_plain) + "\n"
                    )
                except (KeyError, TypeError, ValueError) as error:
                    raise NamedDataError(f"row {number} of {name.path}: {error}") from error
        aside.replace(file)
    finally:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()


def mapped(row: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the columns ``prompt``, ``label`` and ``metadata`` of the table, and its
    own ones.

    A column of the table is a dotted path, a text with ``{column}`` in it, or an object of these.

    Raises:
        KeyError: The row lacks a column that the table names.
    """
    made = {
        key: _value(row, columns[key]) for key in ("prompt", "label", "metadata") if key in columns
    }
    return {**row, **made}


def _value(row: Mapping[str, Any], column: Any) -> Any:
    if isinstance(column, Mapping):
        return {key: _value(row, inner) for key, inner in column.items()}
    if "{" in column:
        return re.sub(r"\{([\w.]+)\}", lambda match: _text(_value(row, match[1])), column)
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(
                f"it has no column {column!r}, which slime's table names; it has "
                f"{', '.join(map(str, row))}"
            )
        value = value[part]
    return value


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _plain(value: object) -> object:
    """Write dates as text; images, audio and bytes have no form in JSON."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(
        f"a {type(value).__name__} cannot be written: data by name has texts and numbers only"
    )


def parts() -> None:
    """Register the reader of names."""
    register("data name", "datasets", data_name)
