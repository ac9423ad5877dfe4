"""One dataclass field is one command-line flag: its default, type, help, choices and state live together."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import math
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from slime.config.files import path_problem

Status = Literal["works", "notice", "refused"]
"""``works``; ``notice``: accepted, and one line says what it does not do; ``refused``: refused with the reason."""

Kind = Literal["value", "switch", "negative", "toggle", "list", "pairs", "repeat", "json", "hook", "path"]
"""How a flag is written: ``--x VALUE``; ``--x``; ``--disable-x`` sets False; ``--x/--no-x``; ``--x A B``;
``--x NAME PATH`` (repeatable, appended); ``--x A --x B``; JSON; a path to the user's function; a file."""

_KEY = "flag"


class _Derived:
    """Marks a flag whose default follows from others."""


DERIVED = _Derived()
"""``flag(DERIVED, ...)``: None until ``resolve_defaults`` has derived the value, which is never None. So the type of
the field needs no ``| None``."""


class Loose(str):
    """Type of a flag whose values may be numbers or expressions: ``8192``, ``8k``, ``[0]*3+[1]*58``."""


@dataclass(frozen=True)
class Flag:
    """Everything known about one flag."""

    name: str  # attribute of Args
    option: str  # as typed: "--rollout-batch-size"
    kind: Kind
    value_type: type  # int, float, str, bool or dict; the element type of lists
    default: Any
    help: str
    group: str  # title of the dataclass it belongs to
    choices: tuple[Any, ...] = ()
    status: Status = "works"
    reason: str = ""
    limits: Mapping[Any, tuple[Status, str]] = dataclasses.field(default_factory=dict)  # per value
    metavar: str | None = None
    optional: bool = True  # None is a value, or stands for the derived one
    low: float | None = None  # least value, also of the elements of a list
    above: float | None = None  # every value is larger
    high: float | None = None  # largest value
    off: float | None = None  # a value outside the range that switches something off
    derived: bool = False  # the default follows from other flags
    or_hook: bool = False  # beside the choices it takes the path of the user's own function or class

    @property
    def takes_list(self) -> bool:
        return self.kind in ("list", "pairs", "repeat")

    @property
    def is_bool(self) -> bool:
        return self.kind in ("switch", "negative", "toggle")


def flag(
    default: object,
    *,
    help: str,
    option: str | None = None,
    kind: Kind | None = None,
    choices: Sequence[str | int] = (),
    status: Status = "works",
    reason: str = "",
    limits: Mapping[str, tuple[Status, str]] | None = None,
    metavar: str | None = None,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    off: float | None = None,
    or_hook: bool = False,
) -> Any:
    """Declare a field of a config dataclass as a flag.

    Args:
        default: the value when the flag is not given; :data:`DERIVED` where it follows from other flags.
        help: one sentence.
        option: as typed, when it is not the field's name with dashes.
        kind: taken from the annotation when left out.
        status, reason: see :data:`Status`. ``limits`` sets them for single values.
        or_hook: whether the path of the user's own function or class is taken beside ``choices``.
        low, above, high, off: the range of a number, see :func:`out_of_range`. Every number must be finite.
    """
    derived = isinstance(default, _Derived)
    default = None if derived else default
    meta = {
        **{"derived": derived, "help": help, "option": option, "kind": kind, "choices": tuple(choices)},
        **{"status": status, "reason": reason, "limits": dict(limits or {}), "metavar": metavar},
        **{"low": low, "above": above, "high": high, "off": off, "or_hook": or_hook},
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=functools.partial(copy.deepcopy, default), metadata={_KEY: meta})
    return dataclasses.field(default=default, metadata={_KEY: meta})


def hook_flag(help: str) -> Any:
    """A flag that names a function or class of the user's, by default none."""
    return flag(None, help=help, kind="hook")


def path_flag(help: str) -> Any:
    """A flag that names a file or folder, by default none."""
    return flag(None, help=help, kind="path")


def flags_of(cls: type) -> dict[str, Flag]:
    """The flags of a composed dataclass by attribute name, in order of declaration."""
    return dict(_flags_of(cls))


@functools.cache
def _flags_of(cls: type) -> dict[str, Flag]:
    hints = get_type_hints(cls)
    groups = {
        name: base.__dict__.get("_title", base.__name__)
        for base in reversed(cls.__mro__)
        for name in inspect.get_annotations(base)
    }
    return {
        field.name: _make(field, hints[field.name], groups[field.name])
        for field in dataclasses.fields(cls)
        if _KEY in field.metadata
    }


def _make(field: dataclasses.Field[Any], hint: object, group: str) -> Flag:
    meta = dict(field.metadata[_KEY])
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    value_type, container, optional = _unwrap(hint)
    optional = optional or default is None
    meta["option"] = meta["option"] or "--" + field.name.replace("_", "-")
    meta["kind"] = meta["kind"] or _infer_kind(value_type, container, optional, field.name)
    return Flag(name=field.name, value_type=value_type, default=default, group=group, optional=optional, **meta)


def _unwrap(hint: object) -> tuple[type, type | None, bool]:
    """``list[int] | None`` -> (int, list, True)."""
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        members = [member for member in get_args(hint) if member is not type(None)]
        optional, hint = len(members) < len(get_args(hint)), members[0]
    if get_origin(hint) is list:
        return get_args(hint)[0], list, optional
    if get_origin(hint) is dict:
        return dict, dict, optional
    if not isinstance(hint, type):
        raise TypeError(f"{hint} cannot be the type of a flag")
    return hint, None, optional


def _infer_kind(value_type: type, container: type | None, optional: bool, name: str) -> Kind:
    if container is list:
        return "list"
    if container is dict or value_type is dict:
        return "json"
    if value_type is bool:
        return "toggle" if optional else "switch"
    if value_type not in (int, float, str):
        raise TypeError(f"field {name!r}: say which kind of flag {value_type} is")
    return "value"


def convert(flag: Flag, value: object) -> Any:
    """Bring a word of the command line, or a value of a YAML file, to the flag's type.

    Raises:
        ValueError: the message says what was expected, without the name of the flag.
    """
    if value is None:
        if flag.optional or flag.default is None:
            return None
        raise ValueError("needs a value, not null")
    if flag.takes_list:
        items = value if isinstance(value, (list, tuple)) else [value]
        return [_convert_one(flag, item) for item in items]
    return _convert_one(flag, value)


def is_hook_path(value: str) -> bool:
    """Whether a text has the form of a path to the user's function or class; no built-in name has it."""
    return "." in value or ":" in value


class OutOfRange(ValueError):
    """A number of the right type that the flag does not take; the message says which ones it takes."""


def out_of_range(flag: Flag, value: object) -> str | None:
    """What is wrong with a number, or with one in a list; None when nothing is."""
    if isinstance(value, (list, tuple)):
        return next((problem for item in value if (problem := out_of_range(flag, item))), None)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value == flag.off:
        return None
    inside = (
        (flag.low is None or value >= flag.low)
        and (flag.above is None or value > flag.above)
        and (flag.high is None or value <= flag.high)
    )
    return None if inside else f"must be {range_text(flag)}"


def range_text(flag: Flag) -> str:
    """The range in words; empty where every finite number is taken."""
    words = [f"above {flag.above}"] if flag.above is not None else []
    if flag.low is not None and flag.high is not None:
        words.append(f"from {flag.low} to {flag.high}")
    elif flag.low is not None:
        words.append(f"at least {flag.low}")
    elif flag.high is not None:
        words.append(f"at most {flag.high}")
    off = f"{flag.off}, or " if flag.off is not None else ""
    return off + " and ".join(words)


def _convert_one(flag: Flag, value: object) -> Any:
    converted = _to_type(flag.value_type, value)
    if isinstance(converted, str):
        converted = _checked_text(flag, converted)
    problem = out_of_range(flag, converted)
    if problem:
        raise OutOfRange(problem)
    if flag.choices and converted not in flag.choices and not (flag.or_hook and is_hook_path(converted)):
        own = ", nor the path of your own (file.py:Name or package.module.Name)" if flag.or_hook else ""
        raise ValueError(f"{converted!r} is not one of {', '.join(map(str, flag.choices))}{own}")
    return converted


def _checked_text(flag: Flag, value: str) -> str:
    """A text as it is used: with the home folder for ``~`` where it names a file, which the shell does not replace in
    ``--load=~/x`` and nobody replaces in a YAML file."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{value!r} is not UTF-8") from None
    if flag.kind not in ("hook", "path", "repeat", "pairs") and not flag.or_hook:
        return value
    problem = path_problem(value)
    if problem:
        raise ValueError(f"{_short(value)}: {problem}")
    return os.path.expanduser(value)


def _to_type(value_type: type, value: object) -> Any:
    if value_type is bool:
        return _to_bool(value)
    if value_type is dict:
        return _to_dict(value)
    if value_type is Loose:
        return _to_loose(value)
    if value_type is str:
        return _to_text(value)
    if isinstance(value, bool):
        raise ValueError(f"needs a number, not {value}")
    if value_type is int:
        return _to_int(value)
    try:
        if not isinstance(value, (str, int, float)):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{value!r} is not a number") from None
    if not math.isfinite(number):  # no comparison with NaN is ever true: it would switch thresholds off
        raise ValueError(f"{value!r} is not a finite number")
    return number


_LARGEST_INT = 2**63 - 1


def _to_text(value: object) -> str:
    """Also of the numbers that YAML makes of a word."""
    if isinstance(value, (dict, list, tuple)):
        raise ValueError(f"needs a text, not {_short(value)}")
    return value if isinstance(value, str) else str(value)


def _to_int(value: object) -> int:
    try:
        if not isinstance(value, (str, int, float)):
            raise ValueError
        number = float(value) if not isinstance(value, int) else value
        if number != int(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{value!r} is not a whole number") from None
    whole = int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(number)
    if abs(whole) > _LARGEST_INT:
        raise ValueError(f"{value!r} is too large")
    return whole


def _to_loose(value: object) -> object:
    for number in (int, float):
        try:
            return number(value) if isinstance(value, str) else value
        except ValueError:
            continue
    return value


def _to_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ValueError(f"{value!r} is neither true nor false")


def _to_dict(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        decoded = json.loads(value if isinstance(value, str) else str(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{_short(value)} is not JSON ({error})") from None
    if not isinstance(decoded, dict):
        raise ValueError(f'needs a JSON object like {{"key": 1}}, not {_short(value)}')
    return decoded


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
