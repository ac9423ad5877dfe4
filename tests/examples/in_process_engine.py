"""The embedded engine on the event loop of a test: a real model over real HTTP, without a process
of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from make_args import make_args

from slime.config.args import FLAGS, Args


@contextlib.asynccontextmanager
async def serving(model: Path) -> AsyncIterator[str]:
    """``http://127.0.0.1:<port>`` of an engine that serves ``model`` in float32."""
    from aiohttp import web

    from slime.engines.http import close_session
    from slime.plugins.embedded import routes_generate
    from slime.plugins.embedded.loading import EngineOptions, load_engine
    from slime.plugins.embedded.served import SERVED
    from slime.plugins.http.server import errors_as_json

    loaded = load_engine(
        EngineOptions(model_path=str(model), dtype="float32", device="cpu", max_total_tokens=4096)
    )
    app = web.Application(middlewares=[errors_as_json()])
    app[SERVED] = loaded
    app.add_routes(routes_generate.routes)
    loaded.engine.start(asyncio.get_running_loop())
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await close_session()
        await runner.cleanup()
        loaded.engine.stop()


def rollout_args(model: Path, url: str, **more: Any) -> Args:
    """For a rollout that asks the engine at ``url``. Names that are no flags are declared, as those
    of a file are.
    """
    host, port = url.removeprefix("http://").split(":")
    changes = {
        "hf_checkpoint": str(model),
        "rollout_backend": "embedded",
        "sglang_router_ip": host,
        "sglang_router_port": int(port),
        "rollout_max_response_len": 16,
    } | more
    args = make_args(**{name: value for name, value in changes.items() if name in FLAGS})
    for name in changes.keys() - FLAGS.keys():
        setattr(args, name, changes[name])
    return args
