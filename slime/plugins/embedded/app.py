"""The HTTP application of one engine, without the process around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from slime.engines.keys import NO_KEYS, ServerKeys
from slime.engines.request_guard import add_last_route, add_routes, request_guard
from slime.plugins.embedded import routes_adapters, routes_control, routes_generate, routes_openai, routes_weights
from slime.plugins.embedded.loading import Loaded
from slime.plugins.embedded.web import LOADED, errors_as_json

MAX_BODY_BYTES = 64 * 2**20
MAX_BODY_BYTES_WITH_IMAGES = 256 * 2**20


def make_app(loaded: Loaded, host: str = "127.0.0.1", keys: ServerKeys = NO_KEYS) -> web.Application:
    """Return an application with all routes of an engine.

    The model thread runs from the startup of the application to its cleanup.

    Args:
        host: The host name or address that clients use, which the check of the ``Host`` header accepts.
        keys: The keys that requests must have.
    """
    size = MAX_BODY_BYTES if loaded.images is None else MAX_BODY_BYTES_WITH_IMAGES
    app = web.Application(middlewares=[request_guard(host, keys=keys), errors_as_json], client_max_size=size)
    app[LOADED] = loaded
    app[routes_weights.GROUPS] = {}
    modules = (routes_generate, routes_control, routes_weights, routes_adapters, routes_openai)
    add_routes(app, [route for module in modules for route in module.routes if isinstance(route, web.RouteDef)])
    add_last_route(app)

    async def model_thread(app: web.Application) -> AsyncIterator[None]:
        loaded.engine.start(asyncio.get_running_loop())
        yield
        loaded.engine.stop()

    app.cleanup_ctx.append(model_thread)
    return app
