"""HTTP clients of a user's own reach the servers of the run, and nobody else gets its key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import aiohttp
import httpx
import openai
import pytest
import requests
from aiohttp import web

from slime.engines import keys as keys_module
from slime.engines.keys import ServerKeys, send_key
from slime.plugins.compat.clients import send_keys_too
from slime.plugins.http.server import errors_as_json, request_guard
from slime.utils.async_utils import run

KEYS = ServerKeys("the-key", "the-admin-key")


class Served:
    """A server that answers with the Authorization header that it got."""

    def __init__(self, keys: ServerKeys | None) -> None:
        async def echo(request: web.Request) -> web.Response:
            if request.path == "/elsewhere":
                return web.Response(status=307, headers={"Location": request.query["to"]})
            choice = {
                "index": 0,
                "finish_reason": "stop",
                "message": {
                    "role": "assistant",
                    "content": request.headers.get("Authorization", "none"),
                },
            }
            return web.json_response({"choices": [choice]})

        async def start() -> tuple[web.AppRunner, int]:
            guard = [errors_as_json(), request_guard(keys=keys)] if keys else []
            app = web.Application(middlewares=guard)
            app.router.add_route("*", "/{path:.*}", echo)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return runner, runner.addresses[0][1]

        self.runner, port = run(start())
        self.url = f"http://127.0.0.1:{port}"


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """The URL of a server of the run, and of another one."""
    monkeypatch.setattr(keys_module, "keys_by_address", {})
    send_keys_too()
    send_keys_too()  # as in a second run of this process
    own, other = Served(KEYS), Served(None)
    send_key(own.url, KEYS)
    yield own.url, other.url
    run(own.runner.cleanup())
    run(other.runner.cleanup())


async def of_aiohttp(url: str) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/generate", json={"text": "a"}) as answer,
    ):
        return str((await answer.json())["choices"][0]["message"]["content"])


async def of_aiohttp_with_a_key(url: str) -> str:
    session = aiohttp.ClientSession(url, headers={"Authorization": "Bearer EMPTY"})
    async with (
        session,
        session.post("/generate", json={}, headers={"authorization": "Bearer EMPTY"}) as answer,
    ):
        return str((await answer.json())["choices"][0]["message"]["content"])


async def of_httpx(url: str) -> str:
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/generate", json={"text": "a"})
        return str(answer.json()["choices"][0]["message"]["content"])


async def of_openai(url: str) -> str:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0)
    answer = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "a"}]
    )
    return str(answer.choices[0].message.content)


async def of_requests(url: str) -> str:
    send = lambda: requests.post(f"{url}/generate", json={"text": "a"}, timeout=20)  # noqa: E731
    answer = await asyncio.to_thread(send)
    return str(answer.json()["choices"][0]["message"]["content"])


CLIENTS = [of_aiohttp, of_aiohttp_with_a_key, of_httpx, of_openai, of_requests]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_that_knows_no_key_is_answered(
    servers: tuple[str, str], client: Callable[[str], Awaitable[str]]
) -> None:
    own, _ = servers
    assert asyncio.run(client(own)) == "Bearer the-key"


@pytest.mark.parametrize("client", CLIENTS)
def test_another_server_gets_no_key_of_the_run(
    servers: tuple[str, str], client: Callable[[str], Awaitable[str]]
) -> None:
    _, other = servers
    assert asyncio.run(client(other)) in ("none", "Bearer EMPTY")


def test_a_redirect_to_another_server_takes_no_key_along(servers: tuple[str, str]) -> None:
    own, other = servers

    async def ask() -> str:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{own}/elsewhere", params={"to": f"{other}/x"}, json={}) as answer,
        ):
            return str((await answer.json())["choices"][0]["message"]["content"])

    assert asyncio.run(ask()) == "none"


def test_a_process_that_was_given_no_key_is_still_refused(servers: tuple[str, str]) -> None:
    own, _ = servers
    keys_module.keys_by_address.clear()
    assert requests.post(f"{own}/generate", json={}, timeout=20).status_code == 401
