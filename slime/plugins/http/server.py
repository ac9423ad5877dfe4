"""Which requests the HTTP servers of slime refuse, how they check the fields of a JSON body, and how
they answer.

The servers have no users other than the programs of a run, none of which is a web browser. A page
in a browser on the same machine can nevertheless send requests to a loopback port, either across
origins or by DNS rebinding.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import socket
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import orjson
from aiohttp import web
from aiohttp.log import server_logger
from aiohttp.typedefs import Handler, Middleware

from slime.config.settings import HIDDEN, redacted_text
from slime.engines.keys import NO_KEYS, ServerKeys

logger = logging.getLogger(__name__)
T = TypeVar("T")
D = TypeVar("D")
MOST_BYTES = 64 << 20
"""Largest body of a request, and the most characters of a text in it."""
SERVING: dict[str, Any] = {
    "access_log": None,
    "shutdown_timeout": 0.2,
    "handler_cancellation": True,
    "auto_decompress": False,
}
"""How aiohttp serves an application."""
MISTAKES = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""What reading a body of another shape raises."""


async def listen(runner: web.AppRunner, host: str, port: int = 0) -> int:
    """Serve an application on a port, and return it; 0 takes a free one."""
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return int(runner.addresses[0][1])


# --- errors --------------------------------------------------------------------------------------


class Refused(Exception):
    """An error that is the answer to a request.

    Args:
        status: The HTTP status; None for that of the class. Client libraries do not retry statuses
            below 500 except 408, 409 and 429.
        code: Machine-readable code in OpenAI's form.

    Attributes:
        headers: Of the answer.
    """

    status = 400
    headers: Mapping[str, str] | None = None

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status or self.status
        self.code = code


class BadRequest(Refused, ValueError):
    """The request is invalid."""


def sglang_error(message: str) -> object:
    """Return the body of an answer with an error, in SGLang's form."""
    return {"error": {"message": message}, "success": False, "message": message}


def errors_as_json(
    form: Callable[[str], object] = sglang_error, mistakes: tuple[type[Exception], ...] = ()
) -> Middleware:
    """Return the first middleware of a server, which answers errors as JSON.

    Args:
        form: Returns the body for the message of an error.
        mistakes: What handlers raise besides :class:`Refused` for a mistake of the client. Every
            other exception is a fault of the server: it is logged, and the status is 500.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        headers: Mapping[str, str] | None = None
        try:
            return await handler(request)
        except Refused as error:
            status = error.status
            message = str(error)
            headers = error.headers
        except web.HTTPException as error:
            status = error.status
            message = f"{request.method} {request.path}: {error.reason}"
        except mistakes as error:
            status = BadRequest.status
            message = f"a field is missing or has a wrong value: {type(error).__name__}: {error}"
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            status = 500
            message = f"{type(error).__name__}: {error}"
        answer = json_answer(form(message), status, headers)
        if not request.content.at_eof():
            # otherwise the server would have to read the rest of the body, which may be long
            answer.force_close()
        return answer

    return middleware


# --- which requests are refused ------------------------------------------------------------------

_SESSION = re.compile(r"(?<=/s/)[^/\s'\"]+")


def _without_keys(record: logging.LogRecord) -> bool:
    """Hide keys in what aiohttp logs of a malformed request: it quotes the request line and the
    headers.
    """
    text = record.getMessage()
    if record.exc_info and record.exc_info[0] is not None:
        text += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
    record.msg = _SESSION.sub(HIDDEN, redacted_text(text))
    record.args = ()
    record.exc_info = None
    return True


server_logger.addFilter(_without_keys)
# values of Sec-Fetch-Site in requests of a web page
_FROM_A_PAGE = ("cross-site", "same-site", "same-origin")


def request_guard(*names: str, keys: ServerKeys = NO_KEYS, only_json: bool = True) -> Middleware:
    """Return a middleware that refuses a request, before its body is read, if the request

    - comes from a web page (403): it has an ``Origin`` header, or a ``Sec-Fetch-Site`` header of a
      page's request;
    - was sent to another host name (403): ``Host`` is neither an IP address, nor ``localhost``, nor
      this machine's name, nor one of ``names``. DNS rebinding always uses a host name, so IP
      addresses are safe;
    - lacks the key of the server in its ``Authorization`` header (401);
    - has a compressed body (415), which can be a thousand times larger after decompression;
    - has a body that is not declared as ``application/json``, if ``only_json`` (415). A web page can
      send such a body without a preflight request.

    Servers should also be started with ``auto_decompress=False``.
    """
    own = {"localhost", *(name.lower() for name in (*names, socket.gethostname()))}

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        _refuse_foreign(request, own, keys, only_json)
        return await handler(request)

    return guard


def _refuse_foreign(request: web.Request, own: set[str], keys: ServerKeys, only_json: bool) -> None:
    headers = request.headers
    if "Origin" in headers or headers.get("Sec-Fetch-Site") in _FROM_A_PAGE:
        raise Refused(
            "requests from web pages are refused (the request has an Origin or Sec-Fetch-Site "
            "header)",
            403,
        )
    host = headers.get("Host", "")
    if not names_this_server(host, own):
        raise Refused(
            f"the Host header names {host!r}, which is not this server; use its IP address or "
            "localhost",
            403,
        )
    if not keys.admits(request.path, headers.get("Authorization", "")):
        raise Refused(
            "the request needs the key of this run in its header 'Authorization: Bearer …'", 401
        )
    if headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise Refused(
            "compressed bodies (Content-Encoding) are refused; send the body as it is", 415
        )
    if only_json and request.body_exists and request.content_type != "application/json":
        raise Refused(
            f"the body must be sent with Content-Type: application/json, not "
            f"{request.content_type!r}",
            415,
        )


def names_this_server(host: str, own: set[str]) -> bool:
    """Return whether a Host header (``name``, ``name:port`` or ``[IPv6]:port``) names this
    server.
    """
    parts = re.fullmatch(r"(?:\[([^\]]*)\]|([^\[\]]*?))(?::[0-9]+)?", host)
    if parts is None:
        return False
    name = parts[1] or parts[2] or ""
    if name.lower().rstrip(".") in own:
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


# --- the fields of a body ------------------------------------------------------------------------

Check: TypeAlias = Callable[[object, str], T]
"""Takes the value of a field and the name of the field, and returns the value with its type or
raises :class:`BadRequest`."""
MOST_VALUES = 65536


async def body_of(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in the body of a request; an empty body is an empty object. All of its
    texts can be encoded as UTF-8.

    Raises:
        Refused: The body is not a JSON object, or is too long (413).
    """
    try:
        body = orjson.loads(await request.read() or b"{}")
    except web.HTTPRequestEntityTooLarge as error:
        raise Refused(f"the body is too large: {error.text}", 413) from error
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def take(
    body: Mapping[str, object], name: str, check: Check[T], default: D, where: str = ""
) -> T | D:
    """Return the checked value of a field, or ``default`` if it is missing or null.

    Args:
        where: A prefix of the field's name in error messages, for example ``buffer.``.
    """
    value = body.get(name)
    return default if value is None else check(value, where + name)


def need(body: Mapping[str, object], name: str, check: Check[T], where: str = "") -> T:
    """Return the checked value of a required field; see :func:`take`.

    Raises:
        BadRequest: The field is missing, or ``check`` refuses its value.
    """
    value = body.get(name)
    if value is None:
        raise BadRequest(f"the field {where + name!r} is missing")
    return check(value, where + name)


def refuse(name: str, rule: str, value: object) -> BadRequest:
    """Return the error for a wrong value, of which the beginning is shown."""
    return BadRequest(f"{name} {rule}, got {value!r:.80}")


def whole(low: int, high: int, rule: str = "") -> Check[int]:
    """Return a check for an integer in ``[low, high]``; 1.0 counts as 1. True and false are not
    integers.
    """
    rule = rule or f"must be a whole number from {low} to {high}"

    def check(value: object, name: str) -> int:
        count = int(value) if isinstance(value, float) and value.is_integer() else value
        if not isinstance(count, int) or isinstance(count, bool) or not low <= count <= high:
            raise refuse(name, rule, value)
        return count

    return check


def number(low: float, high: float, above: bool = False) -> Check[float]:
    """Return a check for a number in ``[low, high]``, or with ``above`` in ``(low, high]``. The result
    is a float.
    """
    rule = f"must be a number {'above' if above else 'from'} {low:g} to {high:g}"

    def check(value: object, name: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise refuse(name, rule, value)
        if not low <= value <= high or (above and value == low):
            raise refuse(name, rule, value)
        return float(value)

    return check


def truth(value: object, name: str) -> bool:
    """Check for true or false; 0 and 1 are not accepted."""
    if not isinstance(value, bool):
        raise refuse(name, "must be true or false", value)
    return value


def string(longest: int = MOST_BYTES) -> Check[str]:
    """Return a check for a string of at most ``longest`` characters."""

    def check(value: object, name: str) -> str:
        if not isinstance(value, str) or len(value) > longest:
            raise refuse(name, f"must be a string of at most {longest} characters", value)
        return value

    return check


def list_of(check: Check[T], most: int = MOST_VALUES, least: int = 0) -> Check[list[T]]:
    """Return a check for a list of ``least`` to ``most`` values that pass ``check``."""

    def check_all(value: object, name: str) -> list[T]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise refuse(name, f"must be a list of {least} to {most} values", value)
        return [check(item, f"{name}[{index}]") for index, item in enumerate(value)]

    return check_all


def one_or_list(check: Check[T], most: int = MOST_VALUES) -> Check[list[T]]:
    """Return a check for one value or a list of values. The result is always a list."""
    several = list_of(check, most)
    return lambda value, name: (
        several(value, name) if isinstance(value, list) else [check(value, name)]
    )


def one_of(*known: str) -> Check[str]:
    """Return a check for one of the strings ``known``."""

    def check(value: object, name: str) -> str:
        if not isinstance(value, str) or value not in known:
            raise refuse(name, f"must be one of {', '.join(known)}", value)
        return value

    return check


def json_object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(name, "must be an object", value)
    return value


# --- answers -------------------------------------------------------------------------------------


def to_json(content: object) -> bytes:
    """Encode an object as JSON in UTF-8. orjson is faster, but rejects integers above 64 bits,
    which models can write."""
    try:
        return orjson.dumps(content)
    except TypeError:
        return json.dumps(content).encode()


def json_answer(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=to_json(content), status=status, headers=headers, content_type="application/json"
    )


def event_stream() -> web.StreamResponse:
    """Return the response whose parts are those of :func:`event`."""
    return web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )


def event(data: object, name: str | None = None) -> bytes:
    """Encode one server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + to_json(data) + b"\n\n"


END = b"data: [DONE]\n\n"
"""The last event of OpenAI's and SGLang's streams."""
