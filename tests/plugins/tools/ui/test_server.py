"""Who may ask the server, and what it answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yarl

from slime.cli.main import main
from slime.engines.process import free_port
from slime.plugins.tools.ui import assets
from slime.plugins.tools.ui.runs import Runs
from slime.plugins.tools.ui.server import Door, PortTaken, bind, is_loopback, serve


@contextlib.asynccontextmanager
async def served(
    runs: Runs, token: str | None = None
) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    listener, stop = bind("127.0.0.1", 0), asyncio.Event()
    port = listener.getsockname()[1]
    task = asyncio.create_task(serve(runs, Door("127.0.0.1", port, token), listener, stop))
    jar = aiohttp.CookieJar(unsafe=True)  # cookies of an IP address
    async with aiohttp.ClientSession(cookie_jar=jar) as session:
        yield f"http://127.0.0.1:{port}", session
    stop.set()
    await task


async def test_the_page_and_its_files(runs: Runs) -> None:
    async with served(runs) as (address, session):
        async with session.get(address + "/") as answer:
            text, policy = await answer.text(), answer.headers["Content-Security-Policy"]
        assert answer.status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
        assert (
            "http://" not in text.replace("http://www.w3.org/2000/svg", "")
            and "https://" not in text
        )
        for name, (kind, content) in assets().items():
            async with session.get(f"{address}/static/{name}") as answer:
                assert (answer.status, answer.content_type, await answer.read()) == (
                    200,
                    kind,
                    content,
                )
            assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_a_value_has_a_tag_and_is_sent_once(runs: Runs) -> None:
    async with served(runs) as (address, session):
        async with session.get(address + "/api/run/tiny/step/1") as answer:
            tag, value = answer.headers["ETag"], await answer.json()
        assert answer.status == 200 and value["step"] == 1
        async with session.get(
            address + "/api/run/tiny/step/1", headers={"If-None-Match": tag}
        ) as answer:
            assert (answer.status, await answer.read()) == (304, b"")
        async with session.get(address + "/api/run/none/step/1") as answer:
            assert answer.status == 404 and "none" in (await answer.json())["error"]


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        ({"Host": "evil.example"}, "/", 403),
        ({"Host": "evil.example:80"}, "/api/runs", 403),
        ({"Host": "localhost:9"}, "/api/runs", 200),
        ({"Host": "127.0.0.1"}, "/api/runs", 200),
        ({"Origin": "https://evil.example"}, "/api/runs", 403),
        ({"Sec-Fetch-Site": "cross-site"}, "/api/runs", 403),
        ({"Sec-Fetch-Site": "same-site"}, "/static/main.js", 403),
        ({"Sec-Fetch-Site": "cross-site"}, "/", 200),
        ({"Sec-Fetch-Site": "same-origin"}, "/api/runs", 200),
        ({}, "/?token=x", 404),
        ({}, "/static/..%2f..%2fserver.py", 404),
        ({}, "/static/%2e%2e/server.py", 404),
        ({}, "/etc/passwd", 404),
    ],
)
async def test_who_may_ask(runs: Runs, headers: dict[str, str], path: str, status: int) -> None:
    async with (
        served(runs) as (address, session),
        session.get(yarl.URL(address + path, encoded=True), headers=headers) as answer,
    ):
        assert answer.status == status


async def test_the_server_only_reads(runs: Runs) -> None:
    async with served(runs) as (address, session):
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            async with session.request(method, address + "/api/runs") as answer:
                assert answer.status == 405


async def test_a_server_that_is_opened_to_others_needs_its_token(runs: Runs) -> None:
    async with served(runs, token="secret") as (address, session):
        for path in (
            "/",
            "/api/runs",
            "/static/main.js",
            "/?token=wrong",
            "/api/runs?token=secret",
        ):
            async with session.get(address + path) as answer:
                assert answer.status == 401, path
        async with session.get(address + "/?token=secret", allow_redirects=False) as answer:
            cookie = answer.headers["Set-Cookie"]
            assert (answer.status, answer.headers["Location"]) == (303, "/")
            assert "HttpOnly" in cookie and "SameSite=Lax" in cookie
        async with session.get(address + "/api/runs") as answer:
            assert answer.status == 200


def test_only_a_loopback_address_needs_no_token() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")] == [
        True
    ] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example", "")] == [
        False
    ] * 5
    assert Door.at("127.0.0.1", 80).address == "http://127.0.0.1:80/"
    assert Door.at("127.0.0.1", 80, always=True).token
    door = Door.at("0.0.0.0", 80)
    assert door.token and door.address == f"http://{socket.gethostname()}:80/?token={door.token}"


@pytest.mark.parametrize("host", ["127.0..1", "a" * 70])
def test_a_host_that_is_no_name(
    host: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ui", str(folder), "--host", host]) == 1
    said = capsys.readouterr().err
    assert f"--host {host}: " in said and "it takes an address of this machine" in said


def test_a_port_that_is_taken() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port}"):
            bind("127.0.0.1", port)


@pytest.mark.real
@pytest.mark.parametrize("words", [(), ("--token",), ("--host", "0.0.0.0")])
def test_the_command_prints_the_address(
    folder: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "slime.cli.main",
        "ui",
        str(folder),
        "--port",
        str(port),
        *words,
    ]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        _, _, token = address.partition("?token=")
        assert bool(token) == bool(words)
        plain = f"http://127.0.0.1:{port}"
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opener.open(f"{plain}/?token={token}" if token else plain)
        assert b'"key":"tiny"' in opener.open(f"{plain}/api/runs").read()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
