"""Command-line flags as dataclass fields. A field declares the default, type, choices and status of
its flag, and the string below the field is its help: one sentence for ``--help``."""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import math
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import (
    Any,
    Literal,
    TypedDict,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from slime.config.files import path_problem
from slime.registry import Part, load, parts

Status = Literal["works", "notice", "refused"]
"""``works``: supported. ``notice``: accepted with a notice that it has no effect. ``refused``: an
error.
"""

Kind = Literal[
    "value", "switch", "negative", "toggle", "list", "pairs", "repeat", "json", "hook", "path"
]
"""The form of a flag. In this order: ``--x VALUE``; ``--x``; ``--disable-x``, which sets False;
``--x`` or ``--no-x``; ``--x A B``; ``--x NAME PATH``, which can be repeated; ``--x A --x B``; a
JSON object; the path of the user's function; a file or folder."""

_KEY = "flag"


class Section:
    """Base of the dataclasses whose fields are flags. What :func:`section` returns is frozen; ``Args``,
    which has the fields of all sections, is not."""

    def __setattr__(self, name: str, value: object) -> None:
        if "_frozen" in self.__dict__:
            raise dataclasses.FrozenInstanceError(
                f"{type(self).__name__}.{name} cannot be set: use dataclasses.replace"
            )
        object.__setattr__(self, name, value)

    def fill(self, **defaults: Any) -> None:
        """Set those of the flags that have no value yet, such as
        ``args.fill(critic_lr=args.lr)``.
        """
        self.__dict__.update(
            {name: value for name, value in defaults.items() if self.__dict__[name] is None}
        )


S = TypeVar("S")


def section(kind: type[S], args: object) -> S:
    """Return the values of one section as an object of its own, which is what a component receives.

    Args:
        kind: The dataclass of the section.
        args: ``Args``, or another object with its attributes.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    made = kind(**{field.name: getattr(args, field.name) for field in fields})
    if isinstance(made, Section):
        made.__dict__["_frozen"] = True
    return made


def own_section(part: Part | None, args: object) -> Any:
    """Return the section of the flags that a registered part brings; None if it has none."""
    return None if part is None or part.flags is None else section(load(part.flags), args)


class Loose(str):
    """Type of a flag whose values may be numbers or expressions: ``8192``, ``8k``,
    ``[0]*3+[1]*58``.
    """


@dataclass(frozen=True)
class Flag:
    """The definition of one flag."""

    name: str  # attribute of Args
    option: str  # as typed: "--rollout-batch-size"
    kind: Kind
    value_type: type  # int, float, str, bool or dict; the element type of lists
    default: Any
    group: str  # title of the dataclass it belongs to
    section: type | None = None  # this dataclass
    text: str = ""  # the help, if it is not the string below the field
    fixed_choices: tuple[Any, ...] = ()
    kind_of_part: str | None = None  # the registered names of this kind are valid, too
    status: Status = "works"
    reason: str = ""
    metavar: str | None = None
    optional: bool = True  # None is a valid value, or means that the value is still to be derived
    low: float | None = None  # smallest valid value; it also applies to the elements of a list
    above: float | None = None  # exclusive lower bound
    high: float | None = None  # largest valid value
    # a value outside the range that disables the feature, such as -1 for top-k
    off: float | None = None
    derived: bool = False  # the default follows from other flags
    or_hook: bool = False  # the path of the user's own function or class is also a valid value
    valid: Callable[[str], object] | None = None  # raises a ValueError for a text that is not valid
    same_as: str = ""  # the attribute whose value is the default
    entries: tuple[
        type, ...
    ] = ()  # the types that the values of a JSON object may have; () for all

    @property
    def help(self) -> str:
        """What the flag means. It is read from the source of the section when ``--help`` shows
        it.
        """
        if self.text or self.section is None:
            return self.text
        return _strings_below_fields(self.section.__module__)[self.section.__name__, self.name]

    @property
    def choices(self) -> tuple[Any, ...]:
        """The valid values; empty if all values of the type are valid."""
        return (
            self.fixed_choices
            if self.kind_of_part is None
            else (*self.fixed_choices, *parts(self.kind_of_part))
        )

    @property
    def takes_list(self) -> bool:
        return self.kind in ("list", "pairs", "repeat")

    @property
    def is_bool(self) -> bool:
        return self.kind in ("switch", "negative", "toggle")


@functools.cache
def _strings_below_fields(module: str) -> dict[tuple[str, str], str]:
    """Return the string below each field of a module's classes, on one line, by the names of class
    and field.
    """
    # Python keeps no such strings at run time.
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    strings = {}
    for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, below in itertools.pairwise(section.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(text)):
                    strings[section.name, name] = " ".join(str(text).split())
    return strings


class Properties(TypedDict, total=False):
    """What a field says about its flag, besides type and default. See :class:`Flag`."""

    help: str
    option: str
    kind: Kind
    choices: Sequence[str | int]
    kind_of_part: str
    status: Status
    reason: str
    metavar: str
    low: float
    above: float
    high: float
    off: float
    or_hook: bool
    valid: Callable[[str], object]
    same_as: str


def flag(default: object = None, **properties: Unpack[Properties]) -> Any:
    """Declare a flag as a field of a config dataclass. A field with a plain default and no other
    property than its type needs no call.

    The type says what else is valid: ``Literal`` lists the choices, and with ``| None`` the flag may
    have no value. Without, and without a default, the value follows from other flags: it is None
    until ``resolve_defaults`` derives it, and never afterwards.

    Args:
        default: The value if the flag is not given.
        properties: See :class:`Flag`. The default of ``help`` is the string below the field; of
            ``option``, the field's name with dashes; of ``kind``, what the annotation implies.
    """
    meta = {_KEY: properties}
    if isinstance(default, (list, dict)):
        copied = functools.partial(copy.deepcopy, default)
        return dataclasses.field(default_factory=copied, metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


def hook_flag() -> Any:
    """Declare a flag that names the user's own function or class. The default is None."""
    return flag(kind="hook")


def path_flag(valid: Callable[[str], object] | None = None) -> Any:
    """Declare a flag that names a file or folder, which ``valid`` checks. The default is None."""
    return flag(kind="path") if valid is None else flag(kind="path", valid=valid)


def flags_of(cls: type) -> dict[str, Flag]:
    """Return the flags of a composed dataclass by attribute name, in the order of their
    declaration.
    """
    return dict(_flags_of(cls))


@functools.cache
def _flags_of(cls: type) -> dict[str, Flag]:
    hints = get_type_hints(cls)
    sections = {
        name: base for base in reversed(cls.__mro__) for name in inspect.get_annotations(base)
    }
    return {
        field.name: _make(field, hints[field.name], sections[field.name])
        for field in dataclasses.fields(cls)
        if _KEY in field.metadata or "_title" in vars(sections[field.name])
    }


def defaults_of(cls: type) -> dict[str, Any]:
    """Return the default of each field of a dataclass."""
    return {field.name: _default(field) for field in dataclasses.fields(cls)}


def _default(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _make(field: dataclasses.Field[Any], hint: object, section: type) -> Flag:
    meta = dict(field.metadata.get(_KEY, {}))
    default = _default(field)
    value_type, choices, is_list, optional = _unwrap(hint)
    kind = meta.pop("kind", None) or _infer_kind(value_type, is_list, default)
    option = ("disable-" if kind == "negative" else "") + field.name.replace("_", "-")
    return Flag(
        name=field.name,
        option=meta.pop("option", f"--{option}"),
        kind=kind,
        value_type=value_type,
        default=default,
        group=vars(section).get("_title", section.__name__),
        section=section,
        text=meta.pop("help", ""),
        fixed_choices=tuple(meta.pop("choices", choices)),
        optional=optional or default is None,
        derived=default is None and not optional,
        entries=_entry_types(hint) if value_type is dict else (),
        **meta,
    )


def _entry_types(hint: object) -> tuple[type, ...]:
    """Return the types of the values in a JSON object: ``dict[str, float] | None`` gives those of
    numbers.
    """
    mapping = next((one for one in (hint, *get_args(hint)) if get_origin(one) is dict), None)
    entry = get_args(mapping)[1] if mapping else Any
    members = get_args(entry) or (entry,)
    return () if Any in members else (*members, *[int] * (float in members))


def _unwrap(hint: object) -> tuple[type, tuple[Any, ...], bool, bool]:
    """Return what a type hint says of a flag: the type of a value, its choices, whether it is a list
    of them, and whether None is valid. ``list[int] | None`` gives (int, (), True, True).
    """
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    one = next(member for member in members if member is not type(None))
    is_list = get_origin(one) is list
    if is_list:
        (one,) = get_args(one)
    choices = get_args(one) if get_origin(one) is Literal else ()
    value_type: Any = type(choices[0]) if choices else get_origin(one) or one
    if value_type not in _READERS:
        raise TypeError(f"{hint} cannot be the type of a flag")
    return value_type, choices, is_list, type(None) in members


def _infer_kind(value_type: type, is_list: bool, default: object) -> Kind:
    if is_list:
        return "list"
    if value_type is bool:
        # What is off by default is only turned on.
        return "toggle" if default is None or default else "switch"
    return "json" if value_type is dict else "value"


def convert(flag: Flag, value: object) -> Any:
    """Convert a word of the command line, or a value of a YAML file, to the flag's type.

    Raises:
        OutOfRange: The number is outside the flag's range.
        ValueError: The value is invalid for another reason. The messages do not name the flag.
    """
    if value is None:
        if flag.optional:
            return None
        raise ValueError("needs a value, not null")
    # In a file, a list of one value may be written without brackets.
    if flag.takes_list:
        items = value if isinstance(value, (list, tuple)) else [value]
        # Names may be joined by commas, too.
        if flag.kind_of_part is not None:
            items = [word for item in items for word in str(item).split(",") if word]
        return [_convert_one(flag, item) for item in items]
    if isinstance(value, list):
        words = " ".join(map(str, value)) or "none"
        raise ValueError(f"it takes {'no' if flag.is_bool else 'one'} value, but has {words}")
    return _convert_one(flag, value)


def is_hook_path(value: str) -> bool:
    """Whether a text has the form of a path to the user's function or class. No built-in name has
    this form.
    """
    return "." in value or ":" in value


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name, with the most similar one; empty if none
    is similar.
    """
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]}?" if near else ""


class OutOfRange(ValueError):
    """Raised for a number outside the range of its flag. The message describes the range."""


def out_of_range(flag: Flag, value: object) -> str | None:
    """Describe why a number, or one in a list, is outside the flag's range; None if all are
    inside.
    """
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
    """Return the range in words, or an empty text if every finite number is valid."""
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
    converted = _READERS[flag.value_type](value)
    if isinstance(converted, str):
        converted = _checked_text(flag, converted)
    if flag.entries:
        _check_entries(converted, flag.entries)
    problem = out_of_range(flag, converted)
    if problem:
        raise OutOfRange(problem)
    if (
        flag.choices
        and converted not in flag.choices
        and not (flag.or_hook and is_hook_path(converted))
    ):
        own = (
            ", nor the path of a class of your own (file.py:Name or package.module.Name)"
            if flag.or_hook
            else ""
        )
        raise ValueError(f"{converted!r} is not one of {', '.join(map(str, flag.choices))}{own}")
    if flag.valid is not None:
        flag.valid(converted)
    return converted


def _check_entries(mapping: dict[str, Any], types: tuple[type, ...]) -> None:
    kinds = " or ".join("a text" if kind is str else "a number" for kind in types[:2])
    problems = [
        f"{shown(key)} needs {kinds}, not {shown(value)}"
        for key, value in mapping.items()
        if isinstance(value, bool) or not isinstance(value, types)
    ]
    if problems:
        raise ValueError("; ".join(problems))


def _checked_text(flag: Flag, value: str) -> str:
    """Check a text, and expand ``~`` if it names a file: the shell does not expand it in
    ``--load=~/x``, and YAML never does."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{value!r} is not UTF-8") from None
    if flag.kind not in ("hook", "path", "repeat", "pairs") and not flag.or_hook:
        return value
    problem = path_problem(value)
    if problem:
        raise ValueError(f"{shown(value)}: {problem}")
    return os.path.expanduser(value)


def _to_float(value: object) -> float:
    value = _number(value)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{value!r} is not a number") from None
    # every comparison with NaN is False, so a NaN would disable thresholds
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _number(value: object) -> str | int | float:
    if isinstance(value, bool):
        raise ValueError(f"needs a number, not {value}")  # YAML's true; int(True) would be 1
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r} is not a number")
    return value


_LARGEST_INT = 2**63 - 1


def _to_text(value: object) -> str:
    # YAML reads an unquoted word such as 123 as a number, so numbers are turned back into text.
    if isinstance(value, (dict, list, tuple)) or callable(value):
        raise ValueError(f"needs a text, not {shown(value)}")
    return str(value)


def _to_int(value: object) -> int:
    value = _number(value)
    try:
        number = value if isinstance(value, int) else float(value)
        if number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(f"{value!r} is not a whole number") from None
    # A float has only 53 bits, so digits are converted directly; "1e6" and "8.0" take the way
    # through float.
    whole = int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(number)
    if abs(whole) > _LARGEST_INT:
        raise ValueError(f"{shown(value)} is too large")
    return whole


def _to_loose(value: object) -> object:
    # 8192 is a number, and 8k or [0]*3+[1]*58 stay texts for the owner of the option.
    for number in int, float:
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
        raise ValueError(f"{shown(value)} is not JSON ({error})") from None
    if not isinstance(decoded, dict):
        raise ValueError(f'needs a JSON object like {{"key": 1}}, not {shown(value)}')
    return decoded


_READERS: dict[type, Callable[[object], Any]] = {
    bool: _to_bool,
    dict: _to_dict,
    float: _to_float,
    int: _to_int,
    str: _to_text,
    Loose: _to_loose,
}


def shown(value: object) -> str:
    """Return the value as error messages show it: at most about 100 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write whole numbers of thousands of digits
        text = f"a value of the type {type(value).__name__} with a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:100]}…"
