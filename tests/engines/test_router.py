"""sglang-router before two engines, one of which is killed while requests run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from aiohttp import web
from engine_parts import engine_args, router_settings

from slime.cluster.health import answers
from slime.engines.handle import EngineHandle, worker_urls
from slime.engines.http import HttpError, take_retries
from slime.engines.launch import RouterSettings
from slime.engines.process import EngineProcess, ServerFailed, wait_gone, without_proxy
from slime.engines.router import Router, Routers, Worker, start_router
from slime.rollout.generate import get_model_url
from slime.utils.async_utils import run
from slime.utils.http_utils import get, post


def test_options_as_words() -> None:
    options = {
        "policy": "manual",
        "dp_aware": True,
        "cors_allowed_origins": ["a", "b"],
        "log_level": "info",
    }
    words = " ".join(RouterSettings(options=options).words)
    assert words.startswith("--policy manual ") and words.endswith(
        " --dp-aware --cors-allowed-origins a b"
    )
    assert "--log-level info" in words and "--cb-timeout-duration-secs 5" in words, (
        "the user's value, and slime's"
    )


def test_a_router_listens_on_its_own_host_and_comes_back_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not on an engine's, which may be another machine (external engines, several nodes)."""
    places: list[tuple[str, int | None]] = []

    def start(args: Any, workers: Any, host: str, port: int | None, log: Path) -> Router:
        places.append((host, port))
        return Router(f"http://{host}:{port or 7000}")

    monkeypatch.setattr("slime.engines.router.start_router", start)
    monkeypatch.setattr("slime.engines.router.address_towards", lambda urls: "10.0.0.1")
    routers = Routers(RouterSettings(), tmp_path)
    routers.start([Worker("http://10.0.0.8:30000"), Worker("http://10.0.0.9:30000")])
    routers.restart("default", [Worker("http://10.0.0.9:30000")])
    assert places == [("10.0.0.1", None), ("10.0.0.1", 7000)]


class Listed(Router):
    """A router that has its engines in a list."""

    def __init__(self, url: str, workers: Sequence[Worker]) -> None:
        super().__init__(url)
        self.listed = [worker.url for worker in workers]

    def workers(self) -> list[dict[str, Any]]:
        return [{"url": url} for url in self.listed]

    def add_workers(self, workers: Sequence[Worker], deadline: float = 0.0) -> None:
        self.listed += [worker.url for worker in workers]

    def remove_worker(self, url: str, deadline: float = 0.0) -> None:
        if url in self.listed:
            self.listed.remove(url)


def test_a_share_without_engines_borrows_those_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "slime.engines.router.start_router", lambda _, workers, *__: Listed("http://h:1", workers)
    )
    engines = [Worker(f"http://127.0.0.1:{index + 1}", index=index) for index in range(5)]
    urls = [engine.url for engine in engines]
    routers = Routers(RouterSettings(), tmp_path, shares=2)
    routers.start(engines)

    def shares() -> list[set[str]]:
        return [set(router.listed) for router in routers.by_share.values()]  # type: ignore[attr-defined]

    assert shares() == [{urls[0], urls[2], urls[4]}, {urls[1], urls[3]}]
    routers.remove_worker(urls[1])
    assert shares()[1] == {urls[3]}
    routers.remove_worker(urls[3])
    assert shares()[1] == shares()[0] == {urls[0], urls[2], urls[4]}
    again = Worker("http://127.0.0.1:9", index=3)  # a restarted engine has another address
    routers.add_worker(again)
    assert shares() == [{urls[0], urls[2], urls[4]}, {again.url}]
    routers.restart("share-1", [*engines[:3], again])
    assert shares() == [{urls[0], urls[2]}, {urls[1], again.url}]
    assert set(routers.by_model["default"].listed) == {urls[0], urls[2], urls[4], again.url}  # type: ignore[attr-defined]


@pytest.mark.real
def test_requests_survive_the_death_of_an_engine(
    start_engine: Callable[..., EngineProcess], tiny_llama: Path, tmp_path: Path
) -> None:
    engines = [start_engine(tiny_llama, wait=False) for _ in range(2)]
    for engine in engines:
        engine.wait_ready(120)
    settings = router_settings(router={"policy": "round_robin"})
    router = start_router(
        settings, [engine.url for engine in engines], log_path=tmp_path / "router.log"
    )
    try:
        assert {worker["url"] for worker in router.workers()} == {engine.url for engine in engines}
        answers = run(load_and_kill(router.url, engines))
        assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [150] * 24
        assert not engines[0].alive()
        router.remove_worker(engines[0].url)
        assert [worker["url"] for worker in router.workers()] == [engines[1].url]
        assert run(post(f"{router.url}/generate", request(99, 3)))["output_ids"]
        listed = run(get(f"{router.url}/workers"))
        assert len(listed["workers"]) == 1
        router.remove_worker("http://127.0.0.1:1")  # unknown: nothing happens
    finally:
        router.stop()
    assert not router.alive()


def request(seed: int, new: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": new, "ignore_eos": True, "sampling_seed": seed}
    return {"input_ids": [5 + seed % 200, 6], "sampling_params": sampling, "return_logprob": True}


async def load_and_kill(url: str, engines: list[EngineProcess]) -> list[Any]:
    """24 requests; the first engine is killed as soon as it works on some of them."""
    tasks = [asyncio.ensure_future(post(f"{url}/generate", request(i, 150))) for i in range(24)]
    victim = EngineHandle(engines[0].url)
    async with asyncio.timeout(60):
        while (await victim.load())["running"] == 0:
            await asyncio.sleep(0.01)
        assert sum(task.done() for task in tasks) < 24
        os.kill(engines[0].pid, signal.SIGKILL)
        engines[0].child.wait(10)
        return list(await asyncio.gather(*tasks))


class Listener:
    """A server that answers like an engine, with its own name: what a router does is seen in who
    answers.
    """

    def __init__(self, name: str) -> None:
        self.name, self.url = name, ""
        self.calls, self.seconds, self.status = 0, 0.0, 200

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/{any:.*}", lambda request: web.json_response({"model_path": "m"}))
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def generate(self, request: web.Request) -> web.Response:
        self.calls += 1
        await asyncio.sleep(self.seconds)
        return web.json_response({"text": self.name, "meta_info": {}}, status=self.status)


@pytest.fixture
def listeners() -> Iterator[list[Listener]]:
    made = [Listener(name) for name in ("a", "b", "c")]
    for listener in made:
        run(listener.start())
    yield made
    for listener in made:
        run(listener.runner.cleanup())


async def ask(url: str, key: str | None = None) -> str:
    from slime.rollout.generate import ROUTING_KEY_HEADER

    headers = {ROUTING_KEY_HEADER: key} if key else None
    body = {"input_ids": [1], "sampling_params": {}}
    return str(
        (await post(url.rstrip("/") + "/generate", body, max_retries=3, headers=headers))["text"]
    )


@pytest.mark.real
def test_a_session_stays_on_one_engine(listeners: list[Listener], tmp_path: Path) -> None:
    router = start_router(
        router_settings(router={"policy": "manual"}),
        [each.url for each in listeners],
        log_path=tmp_path / "log",
    )
    try:
        keys = [f"session-{i}" for i in range(8)]
        turns = [[run(ask(router.url, key)) for key in keys] for _ in range(4)]
        assert turns[1:] == turns[:1] * 3
        assert len(set(turns[0])) > 1  # and not all sessions on the same
    finally:
        router.stop()


@pytest.mark.real
def test_each_served_model_has_its_own_router_and_one_that_runs_already_is_used(
    listeners: list[Listener], tmp_path: Path
) -> None:
    first, second, judge = (each.url for each in listeners)
    foreign = start_router(router_settings(), [], log_path=tmp_path / "foreign.log")
    args = engine_args(
        tmp_path, sglang_router_ip="127.0.0.1", sglang_router_port=urlsplit(foreign.url).port
    )
    routers = Routers(RouterSettings.of(args, args.router), tmp_path)
    try:
        routers.start([Worker(first, "actor"), Worker(second, "actor"), Worker(judge, "judge")])
        args.sglang_model_routers = routers.addresses
        assert routers.url == foreign.url and list(routers.by_model) == ["actor", "judge"]
        assert {worker["url"] for worker in foreign.workers()} == {first, second}
        assert {run(ask(get_model_url(args, "judge", ""))) for _ in range(3)} == {"c"}
        assert {run(ask(get_model_url(args, "actor", ""))) for _ in range(6)} <= {"a", "b"}
        with pytest.raises(ValueError, match=r"'critic'.*actor, judge"):
            get_model_url(args, "critic")
        routers.remove_worker(first)
        assert {run(ask(foreign.url)) for _ in range(3)} == {"b"}
        own = routers.by_model["judge"]
        os.kill(own.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        own.child.wait(10)  # type: ignore[attr-defined]
        ((model, words),) = routers.dead()
        assert model == "judge" and "ended with -9" in words
        routers.restart(model, [Worker(judge, "judge"), Worker(first, "actor")])
        assert run(ask(get_model_url(args, "judge", ""))) == "c" and routers.dead() == []
        routers.stop()
        assert foreign.alive() and foreign.workers() == []
    finally:
        routers.stop()
        foreign.stop()


@pytest.mark.real
@pytest.mark.parametrize("fault", ["refuses", "answers 500"])
def test_one_bad_engine_does_not_draw_the_traffic(
    listeners: list[Listener], tmp_path: Path, fault: str
) -> None:
    """An engine that fails at once always has the least load. The default policy must not send it
    everything.
    """
    *good, bad = listeners
    router = start_router(
        router_settings(), [each.url for each in listeners], log_path=tmp_path / "log"
    )

    async def load() -> None:
        for listener in good:
            listener.seconds = 0.02
        if fault == "refuses":
            await bad.runner.cleanup()
        bad.status = 500
        limit = asyncio.Semaphore(16)

        async def one(i: int) -> None:
            async with limit:
                body = {"input_ids": [1000 + i] * 30, "sampling_params": {}}
                await post(f"{router.url}/generate", body, max_retries=5)

        await asyncio.gather(*(one(i) for i in range(150)))

    try:
        take_retries()
        run(load())
        assert take_retries() <= 50 and bad.calls <= 100
    finally:
        router.stop()


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.long
def test_requests_that_no_engine_takes_bench_the_engines_for_seconds_only(
    listeners: list[Listener], tmp_path: Path
) -> None:
    """The router's circuit breaker counts 4xx, too. Sooner or later a good request must get
    through.
    """
    router = start_router(
        router_settings(), [each.url for each in listeners], log_path=tmp_path / "log"
    )

    async def load() -> None:
        for listener in listeners:
            listener.status = 400
        for _ in range(60):
            with contextlib.suppress(HttpError):
                await post(
                    f"{router.url}/generate",
                    {"input_ids": [1], "sampling_params": {}},
                    max_retries=0,
                )
        for listener in listeners:
            listener.status = 200
        async with asyncio.timeout(50):
            await post(f"{router.url}/generate", {"input_ids": [1], "sampling_params": {}})

    try:
        run(load())
    finally:
        router.stop()


@pytest.mark.real
def test_a_router_that_hangs_is_found_and_started_again(
    listeners: list[Listener], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.engines.router.PING_SECONDS", 0.5)
    routers = Routers(RouterSettings(), tmp_path)
    try:
        routers.start([Worker(listeners[0].url)])
        url = routers.url
        (child,) = psutil.Process(routers.by_model["default"].pid).children()  # type: ignore[attr-defined]
        child.suspend()
        assert routers.dead() == routers.dead() == [], "a few missed calls are forgiven"
        ((model, words),) = routers.dead()
        assert "3 times" in words
        routers.restart(model, [Worker(listeners[0].url)])
        assert routers.url == url and run(ask(url)) == "a" and routers.dead() == []
        assert wait_gone([child], 5.0) == []
    finally:
        routers.stop()


class SlowRouter:
    """A router's own interface, which takes each engine in at the third look; counts what it is
    asked.

    Args:
        ranks: data-parallel ranks of each engine, as a router with ``--dp-aware`` lists them; 0:
            without.
    """

    def __init__(self, ranks: int = 0) -> None:
        self.ranks, self.posts, self.looks = ranks, [], 0  # type: tuple[int, list[str], int]
        self.workers: dict[str, str] = {}
        self.deleted: list[str] = []

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/workers", self.add)
        app.router.add_get("/workers", self.list)
        app.router.add_delete("/workers/{id}", self.delete)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def add(self, request: web.Request) -> web.Response:
        self.posts.append((await request.json())["url"])
        return web.json_response({}, status=202)

    async def list(self, request: web.Request) -> web.Response:
        self.looks += 1
        if self.looks == 3:
            for url in self.posts:
                names = [f"{url}@{rank}" for rank in range(self.ranks)] or [url]
                self.workers |= {f"id{len(self.workers) + i}": name for i, name in enumerate(names)}
        return web.json_response(
            {"workers": [{"id": key, "url": url} for key, url in self.workers.items()]}
        )

    async def delete(self, request: web.Request) -> web.Response:
        self.deleted.append(self.workers.pop(request.match_info["id"]))
        return web.json_response({}, status=202)


@pytest.fixture
def slow_router() -> Iterator[SlowRouter]:
    router = SlowRouter()
    run(router.start())
    yield router
    run(router.runner.cleanup())


def test_many_engines_are_announced_before_the_first_is_waited_for(slow_router: SlowRouter) -> None:
    workers = [Worker(f"http://10.0.0.{i}:1") for i in range(40)]
    Router(slow_router.url).add_workers(workers)
    assert len(slow_router.posts) == 40 and slow_router.looks == 3


def test_a_router_that_takes_too_few_is_an_error_with_their_names(slow_router: SlowRouter) -> None:
    slow_router.looks = 3
    with pytest.raises(ServerFailed, match=r"http://10\.0\.0\.1:1, http://10\.0\.0\.2:1"):
        Router(slow_router.url).add_workers(
            [Worker("http://10.0.0.1:1"), Worker("http://10.0.0.2:1")], deadline=-1.0
        )


def test_ranks_of_an_engine_are_that_engine(slow_router: SlowRouter) -> None:
    """``--router-dp-aware``: one engine is listed once for each data-parallel rank."""
    slow_router.ranks = 2
    router = Router(slow_router.url)
    router.add_workers([Worker("http://10.0.0.1:1"), Worker("http://10.0.0.2:1")])
    address = urlsplit(router.url)
    args = engine_args(
        Path("."), sglang_router_ip=address.hostname, sglang_router_port=address.port
    )
    assert run(worker_urls(get_model_url(args, path=""))) == [
        "http://10.0.0.1:1",
        "http://10.0.0.2:1",
    ]
    router.remove_worker("http://10.0.0.1:1")
    assert slow_router.deleted == ["http://10.0.0.1:1@0", "http://10.0.0.1:1@1"]


@pytest.mark.real
def test_a_proxy_of_the_environment_is_not_used(
    start_engine: Callable[..., EngineProcess],
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither by us nor by the router, and an engine that only reaches the run's own servers uses
    none either.
    """
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{dead.getsockname()[1]}"
        for name in (
            "http_proxy",
            "HTTP_PROXY",
            "https_proxy",
            "HTTPS_PROXY",
            "all_proxy",
            "ALL_PROXY",
        ):
            monkeypatch.setenv(name, proxy)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        engines = [start_engine(tiny_llama, spawned=True)]
        router = start_router(
            router_settings(), [engine.url for engine in engines], log_path=tmp_path / "log"
        )
        try:
            assert run(post(f"{router.url}/generate", request(1, 3), max_retries=1))["output_ids"]
            assert all(answers(engine.url, 30.0) is None for engine in engines)
        finally:
            router.stop()
        for engine in engines:
            assert not psutil.Process(engine.pid).environ()["http_proxy"]


def test_a_proxy_stays_the_way_to_the_model_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "intranet,localhost")
    assert without_proxy(str(tmp_path))["NO_PROXY"] == without_proxy()["no_proxy"] == "*"
    assert (
        without_proxy("Qwen/Qwen3-4B", "10.0.0.1")["no_proxy"]
        == "intranet,localhost,127.0.0.1,::1,10.0.0.1"
    )


@pytest.mark.real
def test_a_router_pairs_servers_that_prefill_and_decode(
    listeners: list[Listener], tmp_path: Path
) -> None:
    prefill, decode, _ = (each.url for each in listeners)
    workers = [
        Worker(prefill, worker_type="prefill", bootstrap_port=8123),
        Worker(decode, worker_type="decode"),
    ]
    router = start_router(router_settings(), workers, log_path=tmp_path / "log")
    try:
        known = {worker["url"]: worker for worker in router.workers()}
        assert (
            known[prefill]["worker_type"] == "prefill" and known[prefill]["bootstrap_port"] == 8123
        )
        assert known[decode]["worker_type"] == "decode"
        assert run(ask(router.url)) == "b"  # both are asked, the one that decodes answers
    finally:
        router.stop()


def test_a_foreign_router_forgets_engines_of_a_start_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took one of two engines; nobody else would ever take that one out again."""
    known: list[str] = []

    def add_workers(self: Router, workers: list[Worker]) -> None:
        known.append(workers[0].url)
        raise ServerFailed("it did not take the second")

    monkeypatch.setattr(Router, "add_workers", add_workers)
    monkeypatch.setattr(
        Router, "remove_worker", lambda self, url: known.remove(url) if url in known else None
    )
    routers = Routers(RouterSettings(address=("10.0.0.1", 30000)), tmp_path)
    with pytest.raises(ServerFailed, match="second"):
        routers.start([Worker("http://10.0.0.2:1"), Worker("http://10.0.0.2:2")])
    routers.stop()
    assert known == []
