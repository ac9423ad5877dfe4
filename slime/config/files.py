"""slime's own tables, and files that users name: checks of the path, YAML files, and the first row
of a data file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from slime.registry import find, parts

_LONGEST_NAME = 255  # bytes; the limit of the usual file systems


_LONGEST_PATH = 4095  # bytes


_SLICE = re.compile(r"@\[(-?\d*):(-?\d*)\]$")


TABLES = Path(__file__).parent / "tables"
"""slime's own tables of flags."""


@functools.cache
def read_json(path: Path) -> Any:
    """Return the content of a JSON file that never changes. It is shared by all callers."""
    return json.loads(path.read_text(encoding="utf-8"))


def path_problem(text: str) -> str | None:
    """Explain why no file can have this name; None if one can."""
    raw = text.encode(errors="surrogateescape")
    if "\0" in text:
        return "the name of a file cannot contain a NUL character"
    if len(raw) > _LONGEST_PATH or any(len(part) > _LONGEST_NAME for part in raw.split(b"/")):
        return (
            f"a file name must have at most {_LONGEST_NAME} bytes, and a path at most "
            f"{_LONGEST_PATH}"
        )
    try:
        Path(text).expanduser()
    except RuntimeError:
        return f"there is no home folder {text.partition('/')[0]}"
    return None


def rollout_template(text: str) -> None:
    """Check the path of a file for each rollout; raises a ValueError if it names only one."""
    if "{rollout_id}" not in text:
        raise ValueError(f"{text}: the path must contain {{rollout_id}}")


def export_template(text: str) -> None:
    """Check a path in which ``{rollout_id}`` is replaced; raises a ValueError for other braces."""
    try:
        text.format(rollout_id=0)
    except (LookupError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{text}: only {{rollout_id}} is replaced; write other braces twice "
            f"({type(error).__name__}: {error})"
        ) from None


def web_address(text: str) -> None:
    """Refuse an address that a request would never reach."""
    if "://" not in text:
        raise ValueError(f"{text}: an address begins with http:// or https://")


def regular_expression(text: str) -> None:
    """Check a regular expression; raises a ValueError that says what is wrong with it."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice in a mapping, of which PyYAML would keep the last value
    only.
    """

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if name in seen:
                raise yaml.MarkedYAMLError(
                    None, None, f"{key.value!r} is given twice", key.start_mark
                )
            seen |= {name} if name is not None and key.value != "<<" else set()
        return node


def load_yaml(file: Path) -> Any:
    """Load a YAML file in UTF-8 that contains plain types only.

    Raises:
        ValueError: The file is not UTF-8 or not valid YAML.
        OSError: The file cannot be read.
    """
    try:
        return yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"it is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8"
        ) from error
    except RecursionError:
        raise ValueError("it is not valid YAML: it is nested too deeply") from None
    # PyYAML raises a ValueError for an impossible date
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"it is not valid YAML: {' '.join(str(error).split())}") from error


def read_yaml(path: str, option: str) -> tuple[dict[str, Any], list[str]]:
    """Read a YAML file that maps flag names to values; return the mapping and all problems with the
    file.
    """
    try:
        content = load_yaml(Path(path).expanduser())
    except (ValueError, OSError) as error:
        return {}, [f"{option} {path}: {error}"]
    if not isinstance(content, dict | None):
        return {}, [
            f"{option} {path}: needs a mapping of flag names to values, not a "
            f"{type(content).__name__}"
        ]
    return content or {}, []


def form_problems(document: object, schema: Mapping[str, object]) -> list[str]:
    """Return one line for each place where a document differs from a JSON schema."""
    from jsonschema import Draft202012Validator

    return [
        f"{error.json_path.removeprefix('$.')}: {error.message}"
        for error in Draft202012Validator(schema).iter_errors(document)
    ]


def read_named_rows(
    path: str,
    option: str,
    kind: type,
    problems_of: Callable[[Mapping[str, Any]], list[str]],
) -> list[Mapping[str, Any]]:
    """Read a YAML file that is a list of mappings with a name each.

    Args:
        kind: The dataclass whose fields are the keys that a mapping may have.
        problems_of: Returns what else is wrong with a mapping.

    Raises:
        ValueError: The file cannot be read, or something is wrong with it. The message has a line
            for each problem.
    """
    try:
        rows = load_yaml(Path(path).expanduser())
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} {path}: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{option} {path}: it must be a list of mappings with a name each")
    known = [field.name for field in dataclasses.fields(kind)]
    problems = []
    names: list[str] = []
    for row in rows:
        if not isinstance(row, Mapping) or not isinstance(row.get("name"), str):
            problems.append(f"{row!r} has no name")
            continue
        name = row["name"]
        found = [f"{key!r} is none of {', '.join(known)}" for key in row if key not in known]
        found += ["two have this name"] if name in names else []
        problems += [f"{name}: {problem}" for problem in [*found, *problems_of(row)]]
        names.append(name)
    if problems:
        raise ValueError("\n".join(f"{option} {path}: {problem}" for problem in problems))
    return rows


class NamedDataError(ValueError):
    """A data set cannot be loaded by its name; the message says why and what to do."""


class NamedData(Protocol):
    """A data set that a registered part finds by its name."""

    @property
    def path(self) -> str:
        """Its name, or its folder."""

    @property
    def reward_type(self) -> str | None:
        """Its usual ``--rm-type``; None if it has none."""

    def file(self) -> str:
        """Return a file of its rows, with a slice as in ``--prompt-data``, which is written first if
        it does not exist.

        Raises:
            NamedDataError: It cannot be loaded.
        """


def data_name(text: str) -> NamedData | None:
    """Return what a value of ``--prompt-data`` names; None if it is the path of a file, whether it
    exists or not.
    """
    return next(filter(None, (find("data name", name)(text) for name in parts("data name"))), None)


def file_of(prompt_data: str) -> Path:
    """Return the path of the file in ``path`` or ``path@[a:b]``."""
    return Path(_SLICE.sub("", prompt_data)).expanduser()


def first_row(prompt_data: str) -> dict[str, Any] | None:
    """Return the first row of a JSONL, Parquet or JSON file; None if it is unreadable, which
    ``slime.data`` reports.
    """
    file = file_of(prompt_data)
    if not file.is_file():
        return None
    try:
        row = _first_of(file)
    except Exception:  # each reader of a format has exceptions of its own
        return None
    return row if isinstance(row, dict) else None


def _first_of(file: Path) -> object:
    if file.suffix == ".parquet":
        import pyarrow.parquet as parquet

        return next(parquet.ParquetFile(file).iter_batches(batch_size=1)).to_pylist()[0]
    if file.suffix == ".json":
        return json.loads(file.read_bytes())[0]
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        return json.loads(next(line for line in lines if line.strip()))


def lookup(row: object, key: str, default: object = None) -> Any:
    """Return the value of a column; a dotted key (``reward_model.ground_truth``) reaches into an
    object.
    """
    if isinstance(row, Mapping) and key in row:
        return row[key]
    head, dot, rest = key.partition(".")
    if dot and isinstance(row, Mapping) and head in row:
        return lookup(row[head], rest, default)
    return default
