"""An engine whose requests will cut off tokens is asked for that before it joins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from engine_parts import engine_args

from slime.engines.plan import EngineSpec
from slime.engines.process import ServerFailed
from slime.engines.sglang.sampler import needs_warm_up, warm_up


def args(**changes: Any) -> Any:
    settings = {"rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "rollout_backend": "sglang"}
    return engine_args(Path("/m"), **{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"rollout_top_p": 0.9}, True),
        ({"rollout_top_k": 20}, True),
        ({"eval_prompt_data": ["aime", "/x"], "eval_temperature": 0.0}, True),  # greedy ones beside the pool's
        ({"eval_prompt_data": ["aime", "/x"], "eval_top_p": 0.7}, True),
        ({"eval_top_p": 0.7}, False),  # of no evaluation
        ({"rollout_top_p": 0.9, "rollout_backend": "embedded"}, False),
    ],
)
def test_what_cuts_off_tokens(changes: dict[str, Any], expected: bool) -> None:
    assert needs_warm_up(args(**changes), EngineSpec(0, "/m")) is expected


@pytest.mark.parametrize("other", [{"updates": False}, {"worker_type": "prefill"}, {"worker_type": "decode"}])
def test_of_the_model_that_learns_whole_servers_are_asked(other: dict[str, Any]) -> None:
    assert not needs_warm_up(args(rollout_top_p=0.9), EngineSpec(0, "/m", **other))


def test_a_data_set_may_have_its_own_top_p(tmp_path: Path) -> None:
    config = tmp_path / "eval.yaml"
    config.write_text("eval: {datasets: [{name: a, path: /x}, {name: b, path: /y, top_p: 0.8}]}")
    assert needs_warm_up(args(eval_config=str(config)), EngineSpec(0, "/m"))


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    app, seen = web.Application(), []

    async def generate(request: web.Request) -> web.Response:
        seen.append(await request.json())
        if len(seen) == 3:
            await asyncio.sleep(0.5)
        return web.json_response({"text": ""}) if len(seen) == 1 else web.Response(status=500, text="no nvcc")

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
    with pytest.raises(ServerFailed, match="cannot draw with top-p and top-k: 500 no nvcc"):
        await asyncio.to_thread(warm_up, url, 5.0)
    with pytest.raises(ServerFailed, match=r"did not answer its first request .*Timeout"):
        await asyncio.to_thread(warm_up, url, 0.1)
