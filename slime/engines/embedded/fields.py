"""Types and ranges of the fields of a request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

T = TypeVar("T")
D = TypeVar("D")
Check: TypeAlias = Callable[[object, str], T]
"""Takes the value of a field and the field's name, and returns the value with its true type."""
_SHOWN = 80  # characters of a wrong value in an error message


class BadRequest(ValueError):
    """The request cannot be served as it is; answered with status 400 and this message."""


def refuse(name: str, rule: str, value: object) -> BadRequest:
    """The error for a wrong value; a long value is cut."""
    shown = repr(value)
    return BadRequest(f"{name} {rule}, got {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '…'}")


def whole(low: int, high: int, rule: str = "") -> Check[int]:
    """An integer in ``[low, high]``; true, false and 1.0 are none."""
    rule = rule or f"must be a whole number from {low} to {high}"

    def check(value: object, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise refuse(name, rule, value)
        return value

    return check


def number(inside: Callable[[float], bool], rule: str) -> Check[float]:
    """A finite number for which ``inside`` is true, as a float."""

    def check(value: object, name: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise refuse(name, rule, value)
        if abs(value) > 1e300 or not math.isfinite(value) or not inside(value):  # an int may be too large for a float
            raise refuse(name, rule, value)
        return float(value)

    return check


def truth(value: object, name: str) -> bool:
    """True or false, not 0 or 1."""
    if not isinstance(value, bool):
        raise refuse(name, "must be true or false", value)
    return value


def text(longest: int) -> Check[str]:
    """A string that can be encoded, of at most ``longest`` characters."""

    def check(value: object, name: str) -> str:
        if not isinstance(value, str) or len(value) > longest or not _encodable(value):
            raise refuse(name, f"must be a string of at most {longest} characters", value)
        return value

    return check


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def list_of(check: Check[T], most: int) -> Check[list[T]]:
    """A list of at most ``most`` values that pass ``check``."""

    def check_all(value: object, name: str) -> list[T]:
        if not isinstance(value, list) or len(value) > most:
            raise refuse(name, f"must be a list of at most {most} values", value)
        return [check(item, f"{name}[{index}]") for index, item in enumerate(value)]

    return check_all


def one_or_list(check: Check[T], most: int) -> Check[list[T]]:
    """One value, or a list; the result is a list."""
    several = list_of(check, most)
    return lambda value, name: several(value if isinstance(value, list) else [value], name)


def one_of(*known: str) -> Check[str]:
    """One of the strings ``known``."""

    def check(value: object, name: str) -> str:
        if not isinstance(value, str) or value not in known:
            raise refuse(name, f"must be one of {', '.join(known)}", value)
        return value

    return check


def json_object(value: object, name: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise refuse(name, "must be a JSON object", value)
    return value


def take(body: Mapping[str, object], name: str, check: Check[T], default: D) -> T | D:
    """A field's checked value; ``default`` where it is missing or null."""
    value = body.get(name)
    return default if value is None else check(value, name)


def need(body: Mapping[str, object], name: str, check: Check[T], where: str = "") -> T:
    """As :func:`take`, for a field that has no default.

    Args:
        where: stands before the field's name in error messages, for example ``buffer.``.

    Raises:
        BadRequest: it is missing, or not what ``check`` wants.
    """
    if body.get(name) is None:
        raise BadRequest(f"the field {where + name!r} is missing")
    return check(body[name], where + name)
