"""What all routes share: the keys of the application, bodies, answers."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from slime.plugins.serve.messages import Refused
from slime.plugins.serve.state import State

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
