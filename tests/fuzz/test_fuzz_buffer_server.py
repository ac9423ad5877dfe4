"""Random bodies for the buffer server of ``examples/rollout_buffer``: an answer or a 4xx, and it
goes on.
"""

from __future__ import annotations

import json
import random
import types
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from example_scripts import load_example
from odd_values import numbers, value

server = load_example("rollout_buffer/server.py")
CHUNKS = 5
ROUTES = {
    "/start_rollout": ("task_type", "engine_url", "engine_headers", "groups"),
    "/buffer/write": ("task_type", "group_index", "samples"),
    "/get_rollout_data": ("task_type", "num_groups"),
}
SAMPLE = {
    "tokens": [1, 2, 3], "response": "x", "response_length": 2, "rollout_log_probs": [-1.0, -1.0],
    "loss_mask": [1, 1], "reward": 1.0, "status": "completed",
}  # fmt: skip


async def run_rollout(task: Any) -> None:
    """A generator that writes nothing: the requests of the test do."""


def good(route: str, group: int) -> dict[str, Any]:
    body: dict[str, Any] = {"task_type": "t"}
    if route == "/start_rollout":
        return {
            **body,
            "engine_url": "http://127.0.0.1:1",
            "engine_headers": {},
            "groups": [{"group_index": group}],
        }
    return (
        {**body, "num_groups": 9}
        if route.startswith("/get")
        else {**body, "group_index": group, "samples": [SAMPLE]}
    )


def request(random_: random.Random) -> tuple[str, bytes]:
    route = random_.choice([*ROUTES])
    body: Any = good(route, random_.randrange(5))
    for _ in range(random_.choice((0, 1, 1, 2))):
        body[random_.choice(ROUTES[route])] = value(random_)
    if route == "/buffer/write" and random_.random() < 0.6:
        body["samples"] = [{**SAMPLE, random_.choice([*SAMPLE]): value(random_)}, SAMPLE]
    if route == "/start_rollout" and random_.random() < 0.3:
        body["groups"] = [{"group_index": value(random_)}, value(random_)]
    body = random_.choice((body, body, body, body, value(random_)))
    content = json.dumps(body).encode()
    return route, random_.choice((content, content, content, content[:-1], b"\xff", b"[" * 100000))


@pytest.mark.parametrize("chunk", range(CHUNKS))
async def test_requests(chunk: int) -> None:
    generator = types.ModuleType("generator")
    generator.TASK_TYPE, generator.run_rollout = "t", run_rollout  # type: ignore[attr-defined]
    runner = web.AppRunner(
        server.make_app({"t": generator}, "http://127.0.0.1:1", "key"), access_log=None
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
    async with aiohttp.ClientSession(headers=headers) as client:

        async def ask(route: str, content: bytes) -> tuple[int, Any]:
            async with client.post(url + route, data=content) as answer:
                return answer.status, await answer.json()

        for case in numbers(chunk, CHUNKS):
            route, content = request(random.Random(f"buffer {case}"))
            status, answer = await ask(route, content)
            assert status == 200 or 400 <= status < 500, (
                case,
                route,
                content[:300],
                status,
                answer,
            )
            assert status == 200 or answer["error"], (case, route)
        for route in ROUTES:
            status, answer = await ask(route, json.dumps(good(route, 77777)).encode())
            assert status == 200, (route, answer)
        assert (
            answer["groups"][-1] == {"group_index": 77777, "samples": [SAMPLE]}
            or len(answer["groups"]) == 9
        )
    await runner.cleanup()
