"""Types and ranges of the fields of a request. A check takes a value and the field's name and returns the value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any, str], Any]
_SHOWN = 80  # characters of a wrong value in an error message


class BadRequest(ValueError):
    """The request cannot be served as it is; answered with status 400 and this message."""


def refuse(name: str, rule: str, value: Any) -> BadRequest:
    """The error for a wrong value; a long value is cut."""
    shown = repr(value)
    return BadRequest(f"{name} {rule}, got {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '…'}")


def whole(low: int, high: int, rule: str = "") -> Check:
    """An integer in ``[low, high]``; true, false and 1.0 are none."""
    rule = rule or f"must be a whole number from {low} to {high}"

    def check(value: Any, name: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise refuse(name, rule, value)
        return value

    return check


def number(inside: Callable[[float], bool], rule: str) -> Check:
    """A finite number for which ``inside`` is true, as a float."""

    def check(value: Any, name: str) -> float:
        if type(value) not in (int, float) or abs(value) > 1e300 or not math.isfinite(value) or not inside(value):
            raise refuse(name, rule, value)
        return float(value)

    return check


def truth(value: Any, name: str) -> bool:
    """True or false, not 0 or 1."""
    if type(value) is not bool:
        raise refuse(name, "must be true or false", value)
    return value


def text(longest: int) -> Check:
    """A string that can be encoded, of at most ``longest`` characters."""

    def check(value: Any, name: str) -> str:
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


def list_of(check: Check, most: int) -> Check:
    """A list of at most ``most`` values that pass ``check``."""

    def check_all(value: Any, name: str) -> list[Any]:
        if not isinstance(value, list) or len(value) > most:
            raise refuse(name, f"must be a list of at most {most} values", value)
        return [check(item, f"{name}[{index}]") for index, item in enumerate(value)]

    return check_all


def one_or_list(check: Check, most: int) -> Check:
    """One value, or a list; the result is a list."""
    several = list_of(check, most)
    return lambda value, name: several(value if isinstance(value, list) else [value], name)


def one_of(*known: str) -> Check:
    def check(value: Any, name: str) -> str:
        if not isinstance(value, str) or value not in known:
            raise refuse(name, f"must be one of {', '.join(known)}", value)
        return value

    return check


def json_object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(name, "must be a JSON object", value)
    return value


def take(body: Mapping[str, Any], name: str, check: Check, default: Any = None, where: str = "") -> Any:
    """A field's checked value; ``default`` where it is missing or null."""
    value = body.get(name)
    return default if value is None else check(value, where + name)


def need(body: Mapping[str, Any], name: str, check: Check) -> Any:
    """As :func:`take`, for a field that has no default.

    Raises:
        BadRequest: it is missing, or not what ``check`` wants.
    """
    if body.get(name) is None:
        raise BadRequest(f"the field {name!r} is missing")
    return check(body[name], name)
