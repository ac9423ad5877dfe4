"""Requests that a web page can send are refused by every HTTP server of slime."""

from __future__ import annotations

import gzip
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from served_engine import Served, served

from slime.engines.http import session
from slime.plugins.agents.server import AgentServer
from slime.utils.async_utils import run

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from example_scripts import load_example

FROM_A_PAGE: dict[str, dict[str, str]] = {
    "origin": {"Origin": "https://evil.example"},
    "null origin": {"Origin": "null"},
    "image tag": {"Sec-Fetch-Site": "cross-site"},
    "rebound name": {"Host": "evil.example"},
    "rebound name and port": {"Host": "evil.example:30000"},
    "looks like an address": {"Host": "127.0.0.1.evil.example"},
    "begins with an address": {"Host": "[::1].evil.example"},
    "address, name and port": {"Host": "[::1].evil.example:80"},
    "address and no port": {"Host": "[::1]:evil"},
    "open bracket": {"Host": "[::1"},
    "two addresses": {"Host": "[::1][::1]"},
    "name in a bracket": {"Host": "[evil.example]:80"},
}
NOT_JSON: dict[str, dict[str, str]] = {
    "form": {"Content-Type": "application/x-www-form-urlencoded"},
    "text": {"Content-Type": "text/plain"},
    "none": {"Content-Type": ""},
    "gzip": {"Content-Encoding": "gzip"},
    "deflate": {"Content-Encoding": "deflate"},
}


class Other:
    """An application that is not the engine, under its own runner."""

    def __init__(self, app: web.Application) -> None:
        self.runner = web.AppRunner(app, auto_decompress=False)
        self.url = run(self._start())

    async def _start(self) -> str:
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Served]:
    with served(tiny_llama) as one:
        yield one


@pytest.fixture(scope="module", params=["engine", "agent", "buffer"])
def server(request: pytest.FixtureRequest, engine: Served) -> Iterator[tuple[str, str, str]]:
    """URL, a path that takes GET and one that takes POST."""
    if request.param == "engine":
        yield engine.url, "/flush_cache", "/pause_generation"
    elif request.param == "agent":
        agent = run(AgentServer("127.0.0.1").start())
        yield f"http://127.0.0.1:{agent.port}", "/v1/models", "/v1/chat/completions"
        run(agent.stop())
    else:
        other = Other(
            load_example("rollout_buffer/server.py").make_app({}, "http://127.0.0.1:1", "k")
        )
        # a page is refused before its key is looked at
        yield other.url, "/health", "/get_rollout_data"
        run(other.runner.cleanup())


def send(url: str, headers: dict[str, str], data: bytes | None) -> tuple[int, str]:
    async def ask() -> tuple[int, str]:
        method = "GET" if data is None else "POST"
        async with session().request(method, url, data=data, headers=headers) as answer:
            return answer.status, await answer.text()

    return run(ask())


@pytest.mark.parametrize("what", FROM_A_PAGE)
def test_pages_are_refused(server: tuple[str, str, str], what: str) -> None:
    url, get, post = server
    assert send(url + get, FROM_A_PAGE[what], None)[0] == 403
    status, text = send(
        url + post, {"Content-Type": "application/json", **FROM_A_PAGE[what]}, b"{}"
    )
    assert status == 403 and ("refused" in text or "Host" in text)


@pytest.mark.parametrize("what", NOT_JSON)
def test_bodies_that_a_page_can_send_are_refused(server: tuple[str, str, str], what: str) -> None:
    url, _, post = server
    data = (
        gzip.compress(b" " * 2_000_000)
        if what in ("gzip", "deflate")
        else json.dumps({"mode": "abort"}).encode()
    )
    status, text = send(url + post, {"Content-Type": "application/json", **NOT_JSON[what]}, data)
    assert status == 415, text


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:5", "10.1.2.3", "[::1]:80", "[::1]"]
)
def test_own_names_and_addresses_are_served(engine: Served, host: str) -> None:
    assert engine.ask("/health", method="GET", Host=host)[0] == 200


def test_the_scheduler_was_not_paused(engine: Served) -> None:
    answer: Any = engine.ask("/server_info", method="GET")[1]
    assert answer["internal_states"][0]["paused"] is False


def statuses(url: str, line: str, headers: str = "", body: bytes = b"") -> list[int]:
    """The status lines of the answers to a request; its body is sent after the first of them."""
    address = urlsplit(url)
    head = (
        f"{line} HTTP/1.1\r\n"
        f"Host: {address.netloc}\r\n"
        "Connection: close\r\n"
        f"Content-Length: {len(body)}\r\n"
        f"{headers}"
    )
    with socket.create_connection(
        (address.hostname or "", address.port or 0), timeout=10
    ) as connection:
        connection.sendall(head.encode("utf-8", "surrogateescape") + b"\r\n")
        answer = connection.recv(1 << 16)
        connection.sendall(body)
        while more := connection.recv(1 << 16):
            answer += more
    return [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


def test_a_client_may_ask_before_it_sends_a_body(server: tuple[str, str, str]) -> None:
    url, _, post = server
    headers = "Expect: 100-continue\r\nContent-Type: application/json\r\n"
    first, then = statuses(url, f"POST {post}", headers, b"[]")
    assert first == 100 and then in (400, 401)


def test_a_known_path_with_another_method_is_not_called_unknown(engine: Served) -> None:
    assert statuses(engine.url, "DELETE /generate") == [405] and statuses(
        engine.url, "GET /nowhere"
    ) == [404]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /s/0123456789abcdef0123456789abcdef/v1/models HTTP/9.x\r\n\r\n",
        b"GET /s/0123456789abcdef0123456789abcdef/v1/" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization : Bearer 0123456789abcdef0123456789abcdef\r\n\r\n",
    ],
    ids=["version", "long line", "header"],
)
def test_keys_of_malformed_requests_stay_out_of_the_log(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    agents = run(AgentServer("127.0.0.1").start())
    try:
        with (
            caplog.at_level("DEBUG"),
            socket.create_connection(("127.0.0.1", agents.port), timeout=10) as connection,
        ):
            connection.sendall(request_bytes)
            assert b" 400 " in connection.recv(65536)
    finally:
        run(agents.stop())
    assert caplog.records and "0123456789abcdef0123456789abcdef" not in caplog.text
