"""Keywords of Python as the settings of a run: models, rows and functions become folders, files and
paths.
"""

from __future__ import annotations

import io
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from slime.api.functions import (
    GroupReward,
    UnknownParameters,
    adapt,
    columns_of_reward,
    forget,
    pack,
    ship,
)

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.data.dataset import PromptMaker
    from slime.data.sample import Message


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
"""A path, or rows: dicts, texts (the prompts), an Arrow table, a pandas data frame, or any iterable
of dicts.
"""
ALIASES = {
    "model": "hf_checkpoint",
    "data": "prompt_data",
    "reward": "custom_rm_path",
    "generate": "custom_generate_function_path",
    "filter": "dynamic_sampling_filter_path",
}
"""Short names of flags. A reward may also be the name of a built-in one, which is ``--rm-type``."""
_FILES = ("override", "custom_config_path")
"""Flags that name files of other flags. They are read with the command line, before single
settings.
"""
_OF_THE_COMMAND_LINE = {
    "max_restarts": "only a command line can be run again",
    "dry_run": "call slime.dry_run instead",
}


def parse(keywords: Mapping[str, Any], folder: Path) -> Args:
    """Return the arguments of a run from keywords, as the command line would from its flags.

    Args:
        keywords: Flags by attribute name, and the names of :data:`ALIASES`. ``eval_data`` is a
            path, rows, or a dict of these by name.
        folder: Gets the files of rows and functions; it must exist as long as the run.

    Raises:
        ConfigError: With all problems at once, in the words of the command line.
    """
    from slime.cluster.checks import check_all
    from slime.config.parser import ConfigError, check_args
    from slime.data.source import prompt_maker

    # A spawned process, such as a worker of --num-data-workers, imports the file of the program.
    if hasattr(multiprocessing.current_process(), "_inheriting"):
        raise RuntimeError(
            "put this call below if __name__ == '__main__': a process imports its file"
        )
    # Problems of keywords and those of flags are collected, so that all of them are told at once.
    settings, problems = _settings(keywords, folder)
    words = []
    for name in _FILES:
        if name in settings:
            words.append(f"--{name.replace('_', '-')}={settings.pop(name)}")
    # Without a word about it, a run that can be inline is: its start is quicker, and errors are the
    # user's own.
    chooses = "inline" not in settings and not os.environ.get("RAY_ADDRESS")
    settings |= {"inline": True} if chooses else {}
    args, found = check_args(words, extra_checks=[check_all], settings=settings)
    if chooses and any(problem.startswith("--inline") for problem in found):
        args, found = check_args(
            words, extra_checks=[check_all], settings={**settings, "inline": False}
        )
    if not args.inline:
        problems += pack(folder)
    problems += [_of_rows(one, folder) for one in found]
    problems = problems or _absent_columns(prompt_maker(args), args.prompt_data, folder)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    for notice in args.notices:
        print(f"slime: {notice}", file=sys.stderr)
    # The program may change its working directory before a snapshot is written.
    own = {name: vars(args)[name] for name in ("save", "save_hf", "critic_save")}
    return args.with_values(**{name: at and os.path.realpath(at) for name, at in own.items()})


def _settings(keywords: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    settings: dict[str, Any] = {}
    problems = []
    # A keyword without a value is as good as none, which lets a program pass on its own optional
    # arguments.
    for given, value in keywords.items():
        name = ALIASES.get(given, given)
        if value is None:
            continue
        # Compared by identity: a data frame compares itself with None element by element.
        if given != name and keywords.get(name) is not None:
            problems.append(f"{given} and {name} are two names of the same flag: give one of them")
        if name in _OF_THE_COMMAND_LINE and not (isinstance(value, int) and not value):
            problems.append(f"{given}: {_OF_THE_COMMAND_LINE[name]}")
            continue
        try:
            settings |= _setting(given, name, value, folder)
        except (UnknownParameters, RowsError) as error:
            problems += [f"{given}: {one}" for one in str(error).splitlines()]
            settings |= _stand_in(name, folder)
    return settings, problems


def _setting(given: str, name: str, value: Any, folder: Path) -> dict[str, Any]:
    """Return one keyword as settings. Rows and functions are written to ``folder``."""
    from slime.config.args import FLAGS

    # Rows and functions have no form on a command line, so they become files in ``folder``.
    if name == "prompt_data":
        return {name: file_of(value, folder / "data.jsonl")}
    if name == "eval_data":
        sets = value if isinstance(value, Mapping) else {"eval": value}
        pairs = [
            (str(key), file_of(rows, folder / f"eval_{place}.jsonl"))
            for place, (key, rows) in enumerate(sets.items())
        ]
        return {"eval_prompt_data": [word for pair in pairs for word in pair]}
    # Some flags may be given several times: then a keyword is a list of paths or functions.
    flag = FLAGS.get(name)
    if (
        flag is not None
        and flag.kind == "repeat"
        and isinstance(value, Sequence)
        and not isinstance(value, str)
    ):
        return {
            name: [
                _path_of(name, f"{given}_{place}", one, folder) for place, one in enumerate(value)
            ]
        }
    if callable(value) and given != "model":  # a loaded model can be called, too
        function = adapt(name, value)
        whole_groups = {"group_rm": True} if isinstance(function, GroupReward) else {}
        return whole_groups | {name: ship(function, given, folder)}
    if given == "reward" and isinstance(value, Iterable) and not isinstance(value, str):
        raise UnknownParameters(
            "it is one function: for several rewards return a dict of them, whose weighted sum is "
            "trained (reward_weights), and each has a curve"
        )
    if given == "reward" and isinstance(value, str) and not any(mark in value for mark in ".:"):
        return {"rm_type": value}
    return {name: os.fspath(value) if isinstance(value, os.PathLike) else value}


def _path_of(name: str, given: str, value: str | Callable[..., Any], folder: Path) -> str:
    return ship(adapt(name, value), given, folder) if callable(value) else value


def _stand_in(name: str, folder: Path) -> dict[str, Any]:
    """A harmless value in place of one that was refused, so that the checks of the others find only
    their problems.
    """
    if name == "prompt_data":
        file = folder / "stand_in.jsonl"
        file.write_text(json.dumps({"prompt": "1 + 1 =", "label": "2"}) + "\n", encoding="utf-8")
        return {name: str(file)}
    return {} if name == "eval_data" else {name: f"{__name__}.stand_in"}


def stand_in(*args: object, **keywords: object) -> float:
    """Stands for a function that was refused; never called."""
    raise AssertionError("the function was refused")


# --- rows ---


class RowsError(ValueError):
    """Rows that cannot be used; each line of the message says which and why."""


def file_of(data: Data, file: Path) -> str:
    """Return the path of data: the one that it is, or that of ``file``, to which rows are
    written.
    """
    from slime.data.rows import Problems

    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    # Rows may come from a generator, so each is written when it arrives.
    count = 0
    problems = Problems()
    with file.open("w", encoding="utf-8") as lines:
        for count, row in enumerate(_rows(data), start=1):
            try:
                lines.write(_line(row) + "\n")
            except RowsError as error:
                problems.add(f"row {count} {error}")
    if not count:
        raise RowsError("there are no rows")
    if problems.count:
        raise RowsError("\n".join(problems.lines()))
    return str(file)


def _absent_columns(make: PromptMaker, data: str | None, folder: Path) -> list[str]:
    """Name what the reward takes and no row has: it would fail for every sample."""
    from slime.data.rows import RowFile

    label = make.keys.label or "label"
    absent = columns_of_reward(folder)
    # Functions of the program's own may make labels.
    if not (absent and data and make.rendered_later):
        return []
    file = RowFile(data)
    rows, report = make.parse(file.read(range(len(file))[:1000]))
    for row in rows:
        absent -= {*row.metadata, *([] if row.label is None else ["label", label])}
    problem = (
        f"reward: it takes {', '.join(map(repr, sorted(absent)))}, which rows have neither as their "
        f"label (label_key={label!r}) nor in their metadata; the rows have {report.names}: name the "
        "column with label_key, or give the parameter a default"
    )
    return [problem] if absent else []


def _of_rows(problem: str, folder: Path) -> str:
    """Return a problem with the keyword and the row in the place of a file of ``folder``, which the
    user did not write and which is gone when the message is read."""
    pattern = re.escape(str(folder)) + r"/(data|eval)(?:_\d+)?\.jsonl(?::(\d+))?"
    keywords = {"data": "data", "eval": "eval_data"}
    return re.sub(
        pattern, lambda file: keywords[file[1]] + (f": row {file[2]}" if file[2] else ""), problem
    )


def _line(row: object) -> str:
    """Return a row as JSON.

    Raises:
        RowsError: It is no row, or it cannot be read again as it is. The message goes on after the
            row's number.
    """
    from slime.data.rows import RawRow

    if not isinstance(row, str | Mapping):
        raise RowsError(f"is a {type(row).__name__}, not a dict or a text")
    try:
        line = json.dumps({"prompt": row} if isinstance(row, str) else dict(row), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowsError(f"cannot be written as JSON: {error}") from error
    # By the same rules as a line of a file, so that a run cannot meet a row that was not checked.
    try:
        RawRow("", line.encode()).decode()
    except ValueError as error:
        raise RowsError(f"cannot be used: {error}") from error
    return line


def _rows(data: Rows) -> Iterable[Any]:
    try:
        if isinstance(data, ArrowTable):
            return data.to_pylist()
        if isinstance(data, DataFrame):
            return [_present(row) for row in data.to_dict("records")]
    # tables of any package, whose columns can hold what cannot be converted
    except Exception as error:
        raise RowsError(f"the table cannot be read: {type(error).__name__}: {error}") from error
    if isinstance(data, io.IOBase):
        raise RowsError(
            "rows are a list of dicts or texts, a table, or a path: give the path of the file, "
            "not the file"
        )
    if isinstance(data, Mapping | bytes) or not isinstance(data, Iterable):
        of = f" of {', '.join(map(repr, list(data)[:9]))}" if isinstance(data, Mapping) else ""
        raise RowsError(
            "rows are a list of dicts or texts, a table, one split of a data set, or a path, not a "
            f"{type(data).__name__}{of}"
        )
    return data


def _present(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a data frame, in which a missing value is None. pandas marks it with NaN."""
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in row.items()
    }


def _plain(value: object) -> object:
    """Convert NumPy's numbers and arrays, which data frames hold; anything else cannot be
    written.
    """
    if isinstance(value, Mapping):
        return dict(value)
    for method in ("tolist", "item"):
        if hasattr(value, method):
            try:
                return getattr(value, method)()
            # a class instead of an object, or a tensor that must not be read
            except Exception as error:
                raise TypeError(f"a {type(value).__name__}: {error}") from error
    raise TypeError(f"{_shown(value)} is a {type(value).__name__}")


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:  # whatever a class of the program's raises
        return "a value that cannot be shown"


class InputFolder(tempfile.TemporaryDirectory[str]):
    """A folder for rows and functions, which is removed with the object or at the end of the
    process.
    """

    def __init__(self) -> None:
        super().__init__(prefix="slime-inputs-", ignore_cleanup_errors=True)

    def cleanup(self) -> None:
        forget(Path(self.name))
        super().cleanup()


# --- prompts for Trainer.sample --------------------------------------------------------------

Prompt = str | list["Message"]
MOST_RESPONSES = 10_000
"""The most responses to one prompt in one call."""


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt: a text, or a list of messages."""
    return isinstance(prompts, str) or (
        isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], Mapping)
    )


def check_prompts(
    prompts: Prompt | Iterable[Prompt], n: int, sampling: Mapping[str, object]
) -> list[Prompt]:
    """Return the prompts as a list.

    Args:
        n: The number of responses to each.
        sampling: Sampling parameters of SGLang. Their names and ranges are checked by the engine.

    Raises:
        ValueError: With all problems at once, one on each line: a prompt is neither a text nor a
            list of messages, a text has half of a surrogate pair, ``n`` is not a number from 1 to
            :data:`MOST_RESPONSES`, or a parameter cannot be sent as JSON.
    """
    # Everything is checked here, before a part of the prompts is sent.
    problems = []
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_RESPONSES:
        problems.append(f"n must be a whole number from 1 to {MOST_RESPONSES}, not {n!r:.60}")
    for name, value in sampling.items():
        try:
            _sendable(value)
        except (TypeError, ValueError, RecursionError) as error:
            problems.append(f"{name}={value!r:.60}: {error}")
    given: list[Any] = []
    if is_single(prompts):  # type: ignore[arg-type]
        given = [prompts]
    elif isinstance(prompts, Iterable) and not isinstance(prompts, Mapping | bytes):
        given = list(prompts)
    else:
        problems.append(
            "prompts are a text, a list of messages, or a list of these, not a "
            f"{type(prompts).__name__}"
        )
    asked: list[Prompt] = []
    for place, prompt in enumerate(given):
        try:
            asked.append(_checked(prompt, str(place)))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return asked


def _checked(prompt: object, place: str) -> Prompt:
    from slime.data.prompts import check_messages

    found = prompt if isinstance(prompt, str) else check_messages(prompt, place)
    try:
        _sendable(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the prompt {place}: {error}") from error
    return found


def _sendable(value: object) -> None:
    from slime.data.rows import check_values

    json.dumps(value, allow_nan=False)
    check_values(value)
