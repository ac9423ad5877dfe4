"""sglang-router before two engines, one of which is killed while requests run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from engine_parts import engine_args

from slime.engines.http_handle import HttpEngineHandle
from slime.engines.process import EngineProcess
from slime.engines.router import Router, Routers, Worker, router_options, start_router
from slime.rollout.generate import get_model_url
from slime.utils.async_utils import run
from slime.utils.http_utils import get, post


def test_options_as_words() -> None:
    options = {"policy": "manual", "router_dp_aware": True, "cors": ["a", "b"], "off": False, "none": None}
    assert router_options(options) == ["--policy", "manual", "--dp-aware", "--cors", "a", "b"]


def test_a_router_listens_on_its_own_host_and_comes_back_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not on an engine's, which may be another machine (external engines, several nodes)."""
    places: list[tuple[str, int | None]] = []

    def start(args: Any, workers: Any, host: str, port: int | None, log: Path) -> Router:
        places.append((host, port))
        return Router(f"http://{host}:{port or 7000}")

    monkeypatch.setattr("slime.engines.router.start_router", start)
    monkeypatch.setattr("slime.engines.router.address_towards", lambda urls: "10.0.0.1")
    routers = Routers(engine_args(tmp_path, sglang_router_ip=None), tmp_path)
    routers.start([Worker("http://10.0.0.8:30000"), Worker("http://10.0.0.9:30000")])
    routers.restart("default", [Worker("http://10.0.0.9:30000")])
    assert places == [("10.0.0.1", None), ("10.0.0.1", 7000)]


@pytest.mark.real
def test_requests_survive_the_death_of_an_engine(
    start_engine: Callable[..., EngineProcess], tiny_llama: Path, tmp_path: Path
) -> None:
    engines = [start_engine(tiny_llama, wait=False) for _ in range(2)]
    for engine in engines:
        engine.wait_ready(120)
    arguments = engine_args(tiny_llama, router={"policy": "round_robin"})
    router = start_router(arguments, [engine.url for engine in engines], log_path=tmp_path / "router.log")
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
    victim = HttpEngineHandle(engines[0].url)
    async with asyncio.timeout(60):
        while (await victim.load())["running"] == 0:
            await asyncio.sleep(0.01)
        assert sum(task.done() for task in tasks) < 24
        os.kill(engines[0].pid, signal.SIGKILL)
        engines[0].child.wait(10)
        return list(await asyncio.gather(*tasks))


class Listener:
    """A server that answers like an engine, with its own name: what a router does is seen in who answers."""

    def __init__(self, name: str) -> None:
        self.name, self.url = name, ""

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
        return web.json_response({"text": self.name, "meta_info": {}})


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
    return str((await post(url.rstrip("/") + "/generate", body, max_retries=3, headers=headers))["text"])


@pytest.mark.real
def test_a_session_stays_on_one_engine(listeners: list[Listener], tmp_path: Path) -> None:
    router = start_router(
        engine_args(tmp_path, router={"policy": "manual"}), [each.url for each in listeners], log_path=tmp_path / "log"
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
    foreign = start_router(engine_args(tmp_path), [], log_path=tmp_path / "foreign.log")
    args = engine_args(tmp_path, sglang_router_ip="127.0.0.1", sglang_router_port=urlsplit(foreign.url).port)
    routers = Routers(args, tmp_path)
    try:
        routers.start([Worker(first, "actor"), Worker(second, "actor"), Worker(judge, "judge")])
        assert routers.url == foreign.url and list(routers.by_model) == ["actor", "judge"]
        assert {worker["url"] for worker in foreign.workers()} == {first, second}
        assert {run(ask(get_model_url(args, "judge", ""))) for _ in range(3)} == {"c"}
        assert {run(ask(get_model_url(args, "actor", ""))) for _ in range(6)} <= {"a", "b"}
        with pytest.raises(ValueError, match="no model 'critic' is served; there are actor, judge"):
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
def test_a_router_pairs_servers_that_prefill_and_decode(listeners: list[Listener], tmp_path: Path) -> None:
    prefill, decode, _ = (each.url for each in listeners)
    workers = [Worker(prefill, worker_type="prefill", bootstrap_port=8123), Worker(decode, worker_type="decode")]
    router = start_router(engine_args(tmp_path), workers, log_path=tmp_path / "log")
    try:
        known = {worker["url"]: worker for worker in router.workers()}
        assert known[prefill]["worker_type"] == "prefill" and known[prefill]["bootstrap_port"] == 8123
        assert known[decode]["worker_type"] == "decode"
        assert run(ask(router.url)) == "b"  # both are asked, the one that decodes answers
    finally:
        router.stop()
