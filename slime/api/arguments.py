"""Keywords of Python as the settings of a run: models, rows and functions become folders, files and paths."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from slime.api.adapters import AsyncGroupReward, GroupReward, UnknownParameters, adapt
from slime.api.shipping import NotShippable, ship

if TYPE_CHECKING:
    from slime.config.args import Args


@runtime_checkable
class ArrowTable(Protocol):
    """The part of an Arrow table that is used here."""

    def to_pylist(self) -> list[dict[str, Any]]: ...


@runtime_checkable
class DataFrame(Protocol):
    """The part of a pandas data frame that is used here."""

    def to_dict(self, orient: str) -> list[dict[str, Any]]: ...

    def itertuples(self) -> Iterable[Any]: ...


Rows: TypeAlias = "Iterable[Mapping[str, Any]] | Iterable[str] | ArrowTable | DataFrame"
Data: TypeAlias = "str | os.PathLike[str] | Rows"
"""A path, or rows: dicts, texts (the prompts), an Arrow table, a pandas data frame, or any iterable of dicts."""
ALIASES = {
    "model": "hf_checkpoint",
    "data": "prompt_data",
    "reward": "custom_rm_path",
    "generate": "custom_generate_function_path",
    "filter": "dynamic_sampling_filter_path",
}
"""Short names of flags. A reward may also be the name of a built-in one, which is ``--rm-type``."""
_FILES = ("override", "custom_config_path")
"""Flags that name files of other flags. They are read with the command line, before single settings."""
_OF_THE_COMMAND_LINE = {"max_restarts": "only a command line can be run again", "dry_run": "call slime.dry_run instead"}


def parse(keywords: Mapping[str, Any], folder: Path) -> Args:
    """Return the arguments of a run from keywords, as the command line would from its flags.

    Args:
        keywords: Flags by attribute name, and the names of :data:`ALIASES`. ``eval_data`` is a path, rows, or a dict of
            these by name.
        folder: Gets the files of rows and functions; it must exist as long as the run.

    Raises:
        ConfigError: With all problems at once, in the words of the command line.
    """
    from slime.cluster.checks import all_checks
    from slime.config.parser import ConfigError, check_args

    settings, problems = _settings(keywords, folder)
    words = [word for name in _FILES if settings.get(name) for word in (f"--{name.replace('_', '-')}", settings[name])]
    for name in _FILES:
        settings.pop(name, None)
    args, found = check_args(words, extra_checks=all_checks(), settings=settings)
    problems += found
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    for notice in args.notices:
        print(f"slime: {notice}", file=sys.stderr)
    return args


def _settings(keywords: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    settings: dict[str, Any] = {}
    problems = []
    for given, value in keywords.items():
        name = ALIASES.get(given, given)
        if given != name and name in keywords:
            problems.append(f"{given} and {name} are two names of the same flag: give one of them")
        if value is None:
            continue
        if name in _OF_THE_COMMAND_LINE and value:
            problems.append(f"{given}: {_OF_THE_COMMAND_LINE[name]}")
            continue
        try:
            settings |= _setting(given, name, value, folder)
        except (NotShippable, UnknownParameters, RowsError) as error:
            problems.append(f"{given}: {error}")
            settings |= _stand_in(name, folder)
    return settings, problems


def _setting(given: str, name: str, value: Any, folder: Path) -> dict[str, Any]:
    """Return one keyword as settings. Rows and functions are written to ``folder``."""
    from slime.config.args import FLAGS

    if name == "prompt_data":
        return {name: _file_of(value, folder / "data.jsonl")}
    if name == "eval_data":
        sets = value if isinstance(value, Mapping) else {"eval": value}
        pairs = [
            (str(key), _file_of(rows, folder / f"eval_{place}.jsonl")) for place, (key, rows) in enumerate(sets.items())
        ]
        return {"eval_prompt_data": [word for pair in pairs for word in pair]}
    flag = FLAGS.get(name)
    if flag is not None and flag.kind == "repeat" and isinstance(value, Sequence) and not isinstance(value, str):
        return {name: [_path_of(name, f"{given}_{place}", one, folder) for place, one in enumerate(value)]}
    if callable(value):
        function = adapt(name, value)
        whole_groups = {"group_rm": True} if isinstance(function, GroupReward | AsyncGroupReward) else {}
        return {name: ship(function, given, folder), **whole_groups}
    if given == "reward" and not any(mark in str(value) for mark in ".:"):
        return {"rm_type": value}
    return {name: os.fspath(value) if isinstance(value, os.PathLike) else value}


def _path_of(name: str, given: str, value: str | Callable[..., Any], folder: Path) -> str:
    return ship(adapt(name, value), given, folder) if callable(value) else value


def _stand_in(name: str, folder: Path) -> dict[str, Any]:
    """A harmless value in place of one that was refused, so that the checks of the others find only their problems."""
    if name == "prompt_data":
        file = folder / "stand_in.jsonl"
        file.write_text(json.dumps({"prompt": "1 + 1 =", "label": "2"}) + "\n", encoding="utf-8")
        return {name: str(file)}
    return {} if name == "eval_data" else {name: f"{__name__}.stand_in"}


def stand_in(*args: object, **keywords: object) -> float:
    """Stands for a function that was refused; never called."""
    raise AssertionError("the function was refused")


# --- rows --------------------------------------------------------------------------------------------


class RowsError(ValueError):
    """Rows that cannot be written as JSON; the message says which and why."""


def _file_of(data: Data, file: Path) -> str:
    """Return the path of data: the one that it is, or that of ``file``, to which rows are written."""
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    count = 0
    with file.open("w", encoding="utf-8") as lines:
        for count, row in enumerate(_rows(data), start=1):
            try:
                lines.write(json.dumps(_row(row, count), ensure_ascii=False, default=_plain) + "\n")
            except TypeError as error:
                raise RowsError(f"row {count} cannot be written as JSON: {error}") from error
    if not count:
        raise RowsError("there are no rows")
    return str(file)


def _rows(data: Rows) -> Iterable[Any]:
    if isinstance(data, ArrowTable):
        return data.to_pylist()
    if isinstance(data, DataFrame):
        return data.to_dict("records")
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise RowsError(f"rows are a list of dicts or texts, a table, or a path, not a {type(data).__name__}")
    return data


def _row(row: object, number: int) -> Mapping[str, Any]:
    if isinstance(row, str):
        return {"prompt": row}
    if isinstance(row, Mapping):
        return row
    raise RowsError(f"row {number} is a {type(row).__name__}, not a dict or a text")


def _plain(value: object) -> object:
    """Convert NumPy's numbers and arrays, which data frames hold; anything else cannot be written."""
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"{value!r:.80} is a {type(value).__name__}")


def input_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for rows and functions, which is removed with the object or at the end of the process."""
    return tempfile.TemporaryDirectory(prefix="slime-inputs-", ignore_cleanup_errors=True)
