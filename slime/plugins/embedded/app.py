"""The HTTP application of one engine, and its routes for pauses, memory, and the description of the
server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from slime.engines.keys import NO_KEYS, ServerKeys
from slime.plugins.embedded import adapters, routes_generate, routes_openai, routes_weights
from slime.plugins.embedded.loading import Loaded
from slime.plugins.embedded.protocol import API_VERSION
from slime.plugins.embedded.served import LOADED, SERVED, engine_of
from slime.plugins.embedded.weights import TAGS
from slime.plugins.http.server import (
    MOST_BYTES,
    body_of,
    errors_as_json,
    json_answer,
    list_of,
    one_of,
    request_guard,
    take,
)

routes = web.RouteTableDef()
FLUSHED = "Cache flushed.\n"
NOT_FLUSHED = "Cache not flushed: requests are running or waiting.\n"
PAUSE_MODES = ("abort", "retract", "in_place")


@routes.post("/pause_generation")
async def pause_generation(request: web.Request) -> web.Response:
    """Pause generation, and answer when no step is running. The field ``mode`` is one of
    :data:`PAUSE_MODES`.
    """
    mode = take(await body_of(request), "mode", one_of(*PAUSE_MODES), "abort")
    engine = engine_of(request)
    await engine.call(engine.pause, mode)
    return json_answer({"message": "Generation paused successfully.", "status": "ok"})


@routes.post("/continue_generation")
async def continue_generation(request: web.Request) -> web.Response:
    engine = engine_of(request)
    await engine.call(engine.scheduler.resume)
    return json_answer({"message": "Generation continued successfully.", "status": "ok"})


@routes.post("/flush_cache")
async def flush_cache(request: web.Request) -> web.Response:
    engine = engine_of(request)
    flushed = await engine.call(engine.scheduler.flush)
    return web.Response(text=FLUSHED if flushed else NOT_FLUSHED, status=200 if flushed else 400)


# --- memory --------------------------------------------------------------------------------------


@routes.post("/release_memory_occupation")
@routes.post("/resume_memory_occupation")
async def memory_occupation(request: web.Request) -> web.Response:
    """Release memory, or take it again. Without ``tags`` this concerns all memory."""
    engine = engine_of(request)
    change = engine.release if request.path == "/release_memory_occupation" else engine.resume
    tags = take(await body_of(request), "tags", list_of(one_of(*TAGS), len(TAGS)), []) or list(TAGS)
    await engine.call(change, tags)
    return json_answer(None)


# --- description and state -----------------------------------------------------------------------


@routes.get("/model_info")
@routes.get("/get_model_info")
async def model_info(request: web.Request) -> web.Response:
    loaded = request.app[LOADED]
    return json_answer(
        {
            "model_path": loaded.options.model_path,
            "tokenizer_path": loaded.options.model_path,
            "is_generation": True,
            "weight_version": loaded.engine.scheduler.weight_version,
        }
    )


@routes.get("/server_info")
@routes.get("/get_server_info")
async def server_info(request: web.Request) -> web.Response:
    """Answer with options and state.

    ``engine`` distinguishes this engine from SGLang, and ``version`` is the SGLang release whose
    interface it serves.
    """
    loaded = request.app[LOADED]
    engine = loaded.engine
    options = loaded.options
    state = {
        "weight_version": engine.scheduler.weight_version,
        "paused": engine.scheduler.paused,
        "halted": sorted(engine.halted),
        "released": sorted(engine.memory.released),
    }
    return json_answer(
        {
            "engine": "embedded",
            "version": API_VERSION,
            "model_path": options.model_path,
            "dtype": options.dtype,
            "device": options.device,
            "tp_size": 1,
            "context_length": loaded.context_len,
            "max_running_requests": engine.scheduler.max_running,
            "max_total_num_tokens": engine.scheduler.max_total_tokens,
            "enable_deterministic_inference": options.deterministic,
            "internal_states": [state],
        }
    )


@routes.get("/v1/loads")
async def loads(request: web.Request) -> web.Response:
    """Answer with what slime reads of SGLang's ``/v1/loads``."""
    scheduler = engine_of(request).scheduler
    load = {
        "num_running_reqs": len(scheduler.running),
        "num_waiting_reqs": len(scheduler.waiting),
        # a copy: the model thread changes the list
        "num_used_tokens": sum(sequence.computed for sequence in list(scheduler.running)),
        "num_held_reqs": scheduler.held,
        "max_running_requests": scheduler.max_running,
    }
    return json_answer({"loads": [load]})


# --- the application, without the process around it ---

MOST_BYTES_WITH_IMAGES = 256 << 20


def make_app(
    loaded: Loaded, host: str = "127.0.0.1", keys: ServerKeys = NO_KEYS
) -> web.Application:
    """Return an application with all routes of an engine.

    The model thread runs from the startup of the application to its cleanup.

    Args:
        host: The host name or address that clients use, which the check of the ``Host`` header
            accepts.
        keys: The keys that requests must have.
    """
    size = MOST_BYTES if loaded.images is None else MOST_BYTES_WITH_IMAGES
    app = web.Application(
        middlewares=[errors_as_json(), request_guard(host, keys=keys)], client_max_size=size
    )
    app[LOADED] = loaded
    app[SERVED] = loaded
    app[routes_weights.GROUPS] = {}
    for table in (
        routes,
        *(module.routes for module in (adapters, routes_generate, routes_openai, routes_weights)),
    ):
        app.add_routes(table)

    async def model_thread(app: web.Application) -> AsyncIterator[None]:
        loaded.engine.start(asyncio.get_running_loop())
        yield
        loaded.engine.stop()

    app.cleanup_ctx.append(model_thread)
    return app
