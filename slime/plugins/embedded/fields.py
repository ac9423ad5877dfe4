"""Bodies and answers of the HTTP routes: the errors that are answers, checks of fields, and
JSON.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import orjson
from aiohttp import web

if TYPE_CHECKING:
    from slime.plugins.embedded.loading import Loaded

logger = logging.getLogger(__name__)


T = TypeVar("T")
D = TypeVar("D")
Check: TypeAlias = Callable[[object, str], T]
"""Takes the value of a field and the name of the field, and returns the value with its type or
raises :class:`BadRequest`."""
_SHOWN = 80  # the most characters of a wrong value in an error message


class Refused(Exception):
    """An error that is the answer to a request, with this status and the message.

    Attributes:
        status: The HTTP status.
    """

    status = 400


class BadRequest(Refused, ValueError):
    """The request is invalid."""


class WeightError(Refused, ValueError):
    """An update does not fit this model. The message names the tensor."""


class TooManyRequests(Refused, RuntimeError):
    """The queue is full. A retry, later or on another engine, may succeed."""

    status = 503


class StepFailed(Refused, RuntimeError):
    """The computation of a sequence raised an exception, which the engine has logged."""

    status = 500


def refuse(name: str, rule: str, value: object) -> BadRequest:
    """Return the error for a wrong value, with the value shortened if it is long."""
    shown = repr(value)
    return BadRequest(
        f"{name} {rule}, got {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '…'}"
    )


def whole(low: int, high: int, rule: str = "") -> Check[int]:
    """Return a check for an integer in ``[low, high]``. True, false and 1.0 are not integers."""
    rule = rule or f"must be a whole number from {low} to {high}"

    def check(value: object, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise refuse(name, rule, value)
        return value

    return check


def number(inside: Callable[[float], bool], rule: str) -> Check[float]:
    """Return a check for a finite number for which ``inside`` is true. The result is a float."""

    def check(value: object, name: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise refuse(name, rule, value)
        # The first comparison is for integers: JSON has no limit for them, and isfinite() fails
        # beyond a float's range.
        if abs(value) > 1e300 or not math.isfinite(value) or not inside(value):
            raise refuse(name, rule, value)
        return float(value)

    return check


def truth(value: object, name: str) -> bool:
    """Check for true or false; 0 and 1 are not accepted."""
    if not isinstance(value, bool):
        raise refuse(name, "must be true or false", value)
    return value


def text(longest: int) -> Check[str]:
    """Return a check for a string of at most ``longest`` characters that can be encoded as
    UTF-8.
    """

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
    """Return a check for a list of at most ``most`` values that pass ``check``."""

    def check_all(value: object, name: str) -> list[T]:
        if not isinstance(value, list) or len(value) > most:
            raise refuse(name, f"must be a list of at most {most} values", value)
        return [check(item, f"{name}[{index}]") for index, item in enumerate(value)]

    return check_all


def one_or_list(check: Check[T], most: int) -> Check[list[T]]:
    """Return a check for one value or a list of values. The result is always a list."""
    several = list_of(check, most)
    return lambda value, name: several(value if isinstance(value, list) else [value], name)


def one_of(*known: str) -> Check[str]:
    """Return a check for one of the strings ``known``."""

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
    """Return the checked value of a field, or ``default`` if it is missing or null."""
    value = body.get(name)
    return default if value is None else check(value, name)


def need(body: Mapping[str, object], name: str, check: Check[T], where: str = "") -> T:
    """Return the checked value of a required field.

    Args:
        where: A prefix of the field's name in error messages, for example ``buffer.``.

    Raises:
        BadRequest: The field is missing, or ``check`` refuses its value.
    """
    if body.get(name) is None:
        raise BadRequest(f"the field {where + name!r} is missing")
    return check(body[name], where + name)


# --- answers -------------------------------------------------------------------------------------

LOADED: web.AppKey[Loaded] = web.AppKey("loaded")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_answer(content: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


def outcome(success: bool, message: str, **more: object) -> web.Response:
    """Return the response to a control call, in SGLang's format."""
    return json_answer({"success": success, "message": message, **more}, 200 if success else 400)


async def body_of(request: web.Request) -> dict[str, object]:
    """Return the JSON object in the body of a request; an empty body is an empty object.

    Raises:
        BadRequest: The body is not a JSON object.
    """
    raw = await request.read()
    if not raw.strip():
        return {}
    try:
        body = orjson.loads(raw)
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert exceptions to JSON responses: 400 for mistakes of the client, 503 for a full queue,
    500 for the rest.
    """
    try:
        return await handler(request)
    except Refused as error:
        status = error.status
        message = str(error)
    except web.HTTPException as error:
        return json_answer(
            {"error": {"message": f"{request.method} {request.path}: {error.reason}"}}, error.status
        )
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        status = 500
        message = f"{type(error).__name__}: {error}"
    return json_answer(
        {"error": {"message": message}, "success": False, "message": message}, status
    )
