"""Retries where they help, none where they hide a mistake."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slime.engines import http
from slime.engines.handle import EngineHandle
from slime.engines.sglang_api import EngineError, choose_api_version
from slime.utils import async_utils, http_utils
from tests.make_args import make_args


class Flaky:
    """Answers as told, then 200 with the request's own body."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.calls = 0
        self.retry_after = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        told = self.script.pop(0) if self.script else 200
        if told == "drop":
            assert request.transport is not None
            request.transport.close()
            await asyncio.sleep(0.1)
        if isinstance(told, int) and told != 200:
            headers = {"Retry-After": self.retry_after} if self.retry_after else None
            return web.json_response(
                {"error": {"message": f"told to say {told}"}}, status=told, headers=headers
            )
        return web.json_response({"got": await request.json() if request.can_read_body else None})


@pytest.fixture
async def flaky(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(http, "FIRST_DELAY_SECONDS", 0.001)
    double = Flaky()
    app = web.Application()
    app.router.add_route("*", "/x", double.answer)
    server = TestServer(app)
    await server.start_server()
    double.url = str(server.make_url("/x"))
    yield double
    await http.close_session()
    await server.close()


async def test_success_and_payload(flaky: Any) -> None:
    assert await http_utils.post(flaky.url, {"a": [1, "é"]}) == {"got": {"a": [1, "é"]}}
    assert await http_utils.get(flaky.url) == {"got": None}


async def test_connection_loss_and_5xx_are_tried_again(flaky: Any) -> None:
    flaky.script = [500, "drop", 503, 502]
    assert await http_utils.post(flaky.url, 1) == {"got": 1}
    assert flaky.calls == 5


async def test_4xx_is_not(flaky: Any) -> None:
    flaky.script = [400]
    with pytest.raises(http.HttpError, match=r"answered 400.*say 400") as failure:
        await http_utils.post(flaky.url, 1)
    assert flaky.calls == 1 and failure.value.status == 400


@pytest.mark.parametrize("status", [408, 429])
async def test_a_full_queue_is_tried_again(flaky: Any, status: int) -> None:
    flaky.script = [status] * 3
    assert await http_utils.post(flaky.url, 1) == {"got": 1}
    assert flaky.calls == 4


@pytest.mark.parametrize(
    ("header", "least"),
    [("7", 7.0), ("100000", http.LONGEST_RETRY_AFTER_SECONDS), ("tomorrow", 0.0), ("-3", 0.0)],
)
async def test_the_server_says_when_to_come_back(
    flaky: Any, monkeypatch: pytest.MonkeyPatch, header: str, least: float
) -> None:
    slept: list[float] = []

    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        # others, such as the server of this test, sleep as well
        if asyncio.current_task() is client:
            slept.append(seconds)
        else:
            await real(seconds)

    client = asyncio.current_task()

    flaky.script, flaky.retry_after = [429], header
    monkeypatch.setattr(http.asyncio, "sleep", sleep)
    assert await http_utils.post(flaky.url, 1) == {"got": 1}
    (delay,) = slept
    assert (
        max(least, 0.75 * http.FIRST_DELAY_SECONDS)
        <= delay
        <= 1.25 * max(least, http.FIRST_DELAY_SECONDS)
    )


async def test_faults_of_a_server_are_reported_and_nothing_else(
    flaky: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[int] = []
    monkeypatch.setattr(http, "_on_fault", None)
    http.watch_faults(lambda: reports.append(flaky.calls))
    flaky.script = [429, 500, "drop"]
    await http_utils.post(flaky.url, 1)
    assert reports == [2, 3]


async def test_a_control_call_survives_one_connection_that_is_closed_on_it(flaky: Any) -> None:
    handle = EngineHandle(flaky.url.removesuffix("/x"))
    flaky.script = ["drop"]
    assert await handle._call("POST", "/x", 1) == {"got": 1} and flaky.calls == 2
    flaky.script = ["drop", "drop"]
    with pytest.raises(EngineError):
        await handle._call("POST", "/x", 1)
    flaky.script = [500]
    with pytest.raises(EngineError, match="say 500"):
        await handle._call("POST", "/x", 1)


async def test_there_is_a_limit(flaky: Any) -> None:
    flaky.script = [500] * 10
    with pytest.raises(http.HttpError, match="say 500"):
        await http_utils.post(flaky.url, 1, max_retries=3)
    assert flaky.calls == 4


async def test_answers_that_cannot_be_answers_are_asked_for_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "FIRST_DELAY_SECONDS", 0.001)
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        raise http.BadAnswer("no ids of tokens")

    with pytest.raises(http.BadAnswer):
        await http.retrying(ask, 20)
    assert asked == http.BAD_ANSWERS


async def test_nobody_listens() -> None:
    with pytest.raises(http.HttpError) as failure:
        await http_utils.post("http://127.0.0.1:9/x", {}, max_retries=0)
    assert failure.value.status is None
    await http.close_session()


async def test_deadline(flaky: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    monkeypatch.setattr(flaky, "answer", slow)
    app = web.Application()
    app.router.add_get("/slow", slow)
    async with TestServer(app) as server:
        with pytest.raises(http.HttpError, match="0 s"):
            await http.request("GET", str(server.make_url("/slow")), None, 0.1)


async def test_handle_errors_name_engine_and_call() -> None:
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/pause_generation"):
        await EngineHandle("http://127.0.0.1:9").pause("abort")
    assert await EngineHandle("http://127.0.0.1:9").health(1.0) is False
    await http.close_session()


def test_run_returns_results_and_exceptions() -> None:
    async def fine() -> int:
        await asyncio.sleep(0)
        return 7

    async def nested() -> int:
        return async_utils.run(fine())

    assert async_utils.run(fine()) == 7
    with pytest.raises(RuntimeError, match="await"):
        async_utils.run(nested())
    with pytest.raises(ZeroDivisionError):
        async_utils.run(fails())


async def fails() -> None:
    raise ZeroDivisionError


def test_the_api_version_is_chosen_by_what_the_server_says() -> None:
    embedded = choose_api_version(
        {"engine": "embedded", "version": "0.5.23", "enable_deterministic_inference": True}, "u"
    )
    assert embedded.kind == "embedded" and embedded.capabilities.deterministic
    newest = choose_api_version({"version": "0.6.0rc1"}, "u")
    assert (
        newest.kind == "sglang"
        and newest.capabilities.update_brackets
        and not newest.capabilities.named_checksums
    )
    older = choose_api_version({"version": "0.5.15.post1"}, "u").capabilities
    assert not (older.update_brackets or older.retract or older.version_spans)
    assert choose_api_version({"version": "0.5.22"}, "u").capabilities == older
    with pytest.raises(EngineError, match=r"u is SGLang 0\.4\.1"):
        choose_api_version({"version": "0.4.1"}, "u")


async def test_all_tries_of_a_users_request_have_one_limit(
    flaky: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_request_seconds", 0.3)
    flaky.script = [500] * 10_000
    with pytest.raises(http.HttpError, match=r"0.3 s \(--sglang-router-request-timeout-secs"):
        await http_utils.post(flaky.url, 1, max_retries=10_000)
    assert 1 < flaky.calls < 10_000


@pytest.mark.real
def test_a_process_with_a_request_under_way_ends_without_a_complaint() -> None:
    """Its retries would open a new pool of connections after the old one was closed."""
    program = (
        "import asyncio, time\n"
        "from slime.engines import background, http\n"
        "loop = background.background_loop('other')\n"
        "asyncio.run_coroutine_threadsafe(http.get('http://127.0.0.1:9/x', 10_000), loop)\n"
        "while loop not in http._sessions: time.sleep(0.01)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_does_not_count_the_retries_of_the_run_before_it_in_this_process() -> None:
    http.add_retries(3)
    http.init_http_client(make_args())
    assert http.take_retries() == 0
