"""Helpers that all routes use."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

from slime.plugins.embedded.engine import StepFailed, TooManyRequests
from slime.plugins.embedded.fields import BadRequest
from slime.plugins.embedded.loading import Loaded
from slime.plugins.embedded.weights import WeightError

logger = logging.getLogger(__name__)

LOADED: web.AppKey[Loaded] = web.AppKey("loaded", Loaded)
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
    """Convert exceptions to JSON responses: 400 for mistakes of the client, 503 for a full queue, 500 for the rest."""
    try:
        return await handler(request)
    except (BadRequest, WeightError, TooManyRequests, StepFailed) as error:  # the engine has logged a failed step
        status = 503 if isinstance(error, TooManyRequests) else 500 if isinstance(error, StepFailed) else 400
        message = str(error)
    except web.HTTPException as error:
        return json_answer({"error": {"message": f"{request.method} {request.path}: {error.reason}"}}, error.status)
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        status, message = 500, f"{type(error).__name__}: {error}"
    return json_answer({"error": {"message": message}, "success": False, "message": message}, status)
