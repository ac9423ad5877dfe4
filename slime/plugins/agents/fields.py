"""Helpers that the three APIs share: checks of request fields, errors, JSON, and server-sent events.

Every value is checked before it is used. A mistake of a client leads to a response with status 400, never to an error
of the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import orjson

from slime.types import JsonObject

logger = logging.getLogger(__name__)
T = TypeVar("T")
Reply = dict[str, object]
"""A JSON object that is sent to a client or to an engine. Objects that clients send are of type ``JsonObject``."""
_noted: set[str] = set()


class ApiError(Exception):
    """An error that is sent to the client in the form of its API.

    Args:
        status: HTTP status. Client libraries do not retry statuses below 500 except 408, 409 and 429.
        code: Machine-readable code in OpenAI's form.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Kind(NamedTuple):
    """The JSON types that a field may have."""

    types: tuple[type, ...]
    words: str


TEXT = Kind((str,), "a string")
FLAG = Kind((bool,), "true or false")
OBJECT = Kind((dict,), "an object")
LIST = Kind((list,), "a list")
CONTENT = Kind((str, list), "a string or a list of parts")
STOPS = Kind((str, list), "a string or a list of strings")
CHOICE = Kind((str, dict), "a string or an object")


def check_fields(body: Mapping[str, object], table: Mapping[str, Kind], where: str = "") -> None:
    """Raise an :class:`ApiError` for the first field whose type differs from the table. null counts as absent."""
    for name, kind in table.items():
        value = body.get(name)
        if value is not None and not isinstance(value, kind.types):
            raise ApiError(400, f"{where}{name} must be {kind.words}, got {_shown(value)}")


def guarded(read: Callable[[JsonObject], T], body: JsonObject) -> T:
    """Call ``read(body)``, and treat any error about the shape of the body as a mistake of the client.

    Raises:
        ApiError: With status 400.
    """
    try:
        return read(body)
    except (TypeError, AttributeError, LookupError, ValueError, RecursionError) as error:
        logger.debug("a request could not be parsed", exc_info=True)
        raise ApiError(400, f"the request could not be parsed: {type(error).__name__}: {error}"[:500]) from error


def to_json(content: object) -> bytes:
    """Encode an object as JSON in UTF-8. orjson is faster, but rejects integers above 64 bits, which models can
    write."""
    try:
        return orjson.dumps(content)
    except TypeError:
        return json.dumps(content).encode()


def event(data: Reply, name: str | None = None) -> bytes:
    """Encode one server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + to_json(data) + b"\n\n"


def whole_number(body: JsonObject, *names: str) -> int | None:
    """Return the first of these fields that is present. It must be a whole number above 0; ``10.0`` counts as 10."""
    for name in names:
        value = body.get(name)
        if value is not None:
            number = int(value) if isinstance(value, float) and value.is_integer() else value
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ApiError(400, f"{name} must be a whole number above 0, got {_shown(value)}")
            return number
    return None


def strings(body: JsonObject, name: str) -> list[str]:
    """Return a field that is a string or a list of strings as a list without empty strings."""
    value = body.get(name) or []
    items = [value] if isinstance(value, str) else value
    found = [item for item in items if isinstance(item, str)] if isinstance(items, list) else None
    if found is None or not isinstance(items, list) or len(found) < len(items):
        raise ApiError(400, f"{name} must be {STOPS.words}, got {_shown(value)}")
    return [item for item in found if item]


def inner_object(body: JsonObject, name: str, where: str = "") -> JsonObject | None:
    """Return a field that is an object; None if it is absent or null.

    Args:
        where: Prefix of the field's name in error messages.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise ApiError(400, f"{where}{name} must be {OBJECT.words}, got {_shown(value)}")
    return value


def objects(body: JsonObject, name: str, required: bool = True) -> list[JsonObject]:
    """Return a field that must be a list of objects, with at least one if ``required``."""
    value = body.get(name)
    if value is None and not required:
        return []
    found = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else None
    if found is None or not isinstance(value, list) or len(found) < len(value) or (required and not found):
        raise ApiError(400, f"{name} must be a list of objects" + (", at least one" if required else ""))
    return found


def note(name: str, words: str) -> None:
    """Log once per process that slime does not treat a value of a request as the client may expect."""
    if name not in _noted:
        _noted.add(name)
        logger.warning("request of an agent program: %r %s (this is logged only once)", name, words)


def _shown(value: object) -> str:
    return repr(value)[:100]
