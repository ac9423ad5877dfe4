"""What all routes share: who may ask, the keys of the application, bodies, answers."""

from __future__ import annotations

import hmac
import socket
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from slime.engines.request_guard import names_this_server
from slime.plugins.serve.limits import OverLimit
from slime.plugins.serve.messages import Refused
from slime.plugins.serve.protobuf import Malformed
from slime.plugins.serve.state import State, Unknown

PREFIX = "/api/v1"
STATE_KEY = web.AppKey("state", State)
SECRET = web.AppKey("secret", bytes)
"""Signs the addresses of files."""
TENANT = web.RequestKey("tenant", str)


def failure(status: int, message: str) -> web.Response:
    return json_answer({"detail": message, "error": message}, status)


def json_answer(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


async def body_of(request: web.Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read() or b"{}")
    except orjson.JSONDecodeError as error:
        raise Refused(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("the body must be an object")
    return body


def base_name(state: State) -> str:
    """Return the name of the base model: the folder or the hub id that the server was given."""
    return str(state.args.hf_checkpoint)


def guard(keys: dict[str, str]) -> Middleware:
    """Refuse a request before its body is read, if it comes from a web page, names another host, or
    has no tenant's key.
    """

    own = {"localhost", socket.gethostname().lower()}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = request.headers
        if "Origin" in headers or "Sec-Fetch-Site" in headers:
            return failure(403, "requests from web pages are refused")
        if not names_this_server(headers.get("Host", ""), own):
            return failure(403, "the Host header names another server; use an IP address")
        if headers.get("Content-Encoding", "identity") != "identity":
            return failure(415, "compressed bodies are refused")
        given = headers.get("X-API-Key", "").encode(errors="surrogateescape")
        tenant = ""
        for name, key in keys.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(given, key.encode()):
                tenant = name
        open_paths = (f"{PREFIX}/healthz", f"{PREFIX}/files/")
        if not tenant and not request.path.startswith(open_paths):
            return failure(401, "X-API-Key is not the key of a tenant of this server")
        request[TENANT] = tenant
        return await handler(request)

    return check


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Unknown as error:
        return failure(404, str(error.args[0]))
    except OverLimit as error:
        # the client waits after 429, and gives up after 403
        answer = failure(403 if error.seconds is None else 429, str(error))
        if error.seconds is not None:
            answer.headers["Retry-After"] = str(error.seconds)
        return answer
    except (Refused, Malformed) as error:
        return failure(422, str(error))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        return failure(422, f"a field is missing or has a wrong value: {error}")
