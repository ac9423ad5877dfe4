"""A resources server with the paths and the bodies of NeMo-Gym's, of either kind; and one of the
package itself.

    python gym_server.py NAME PORT      the resources server NAME of the installed package nemo-gym
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web


@contextlib.asynccontextmanager
async def gym_server(kind: str) -> AsyncIterator[tuple[str, list[Any]]]:
    """Serve until the end of the block; yields the URL and what was sent: path, session, body."""
    sent: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        path = request.path.strip("/")
        if path == "openapi.json":
            kinds = {"calls": ("seed_session", "verify", "add"), "steps": ("reset", "step")}
            return web.json_response({"paths": {f"/{name}": {} for name in kinds[kind]}})
        body = await request.json()
        session = request.cookies.get("session")
        sent.append((path, session, body))
        response = web.json_response(REPLIES[path](body))
        if path in ("seed_session", "reset"):
            response.set_cookie("session", f"s{len(sent)}")
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", sent
    finally:
        await runner.cleanup()


def said(body: Any) -> str:
    """The text of the last message of a response."""
    return str(body["response"]["output"][-1]["content"][0]["text"])


def step(body: Any) -> Any:
    """Ask for the word stop, once more if it does not come."""
    items = body["response"]["output"]
    calls = [item for item in items if item["type"] == "function_call"]
    outputs = [{"call_id": call["call_id"], "output": "called"} for call in calls]
    done = not calls and "stop" in said(body)
    observation = None if done or calls else "Say stop."
    return {
        "observation": observation, "reward": 0.5 + done, "terminated": done, "truncated": False,
        "info": {"tool_outputs": outputs},
    }  # fmt: skip


REPLIES: dict[str, Any] = {
    "seed_session": lambda body: {},
    "add": lambda body: {"sum": sum(body["numbers"])},
    "verify": lambda body: {**body, "reward": float(body["wanted"] in said(body))},
    "reset": lambda body: {"observation": "Begin.", "info": {}},
    "step": step,
}


def main() -> None:
    """Serve a resources server of the package, as its own launcher does, but alone."""
    from unittest.mock import MagicMock

    import uvicorn
    from nemo_gym.server_utils import ServerClient

    name, port = sys.argv[1], int(sys.argv[2])
    module = importlib.import_module(f"resources_servers.{name}.app")
    own = [value for value in vars(module).values() if isinstance(value, type)]
    server = next(
        one for one in own if one.__module__ == module.__name__ and hasattr(one, "setup_webserver")
    )
    config = server.model_fields["config"].annotation(
        host="127.0.0.1", port=port, entrypoint="app.py", name=name, domain="other"
    )
    app = server(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
