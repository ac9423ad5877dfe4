"""The one request that has SGLang compile what draws with top-p and top-k."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slime.engines.process import ServerFailed
from slime.plugins.sglang.launch import warm_up


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    app, seen = web.Application(), []

    async def generate(request: web.Request) -> web.Response:
        seen.append(await request.json())
        if len(seen) == 3:
            await asyncio.sleep(0.5)
        return (
            web.json_response({"text": ""})
            if len(seen) == 1
            else web.Response(status=500, text="no nvcc")
        )

    app.router.add_post("/generate", generate)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    server.seen = seen  # type: ignore[attr-defined]
    yield server
    await server.close()


async def test_one_request_with_top_p_and_top_k_and_its_failure_said(server: Any) -> None:
    url = str(server.make_url("/")).rstrip("/")
    await asyncio.to_thread(warm_up, url, 5.0)
    params = server.seen[0]["sampling_params"]
    assert params["top_p"] < 1 and params["top_k"] > 1 and params["temperature"] > 0
    with pytest.raises(ServerFailed, match=r"top-p.*500 no nvcc"):
        await asyncio.to_thread(warm_up, url, 5.0)
    with pytest.raises(ServerFailed, match=r"first request .*Timeout"):
        await asyncio.to_thread(warm_up, url, 0.1)
