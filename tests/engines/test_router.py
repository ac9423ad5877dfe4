"""sglang-router before two engines, one of which is killed while requests run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_parts import engine_args

from slime.engines.http_handle import HttpEngineHandle
from slime.engines.process import EngineProcess
from slime.engines.router import router_options, start_router
from slime.utils.async_utils import run
from slime.utils.http_utils import get, post


def test_options_as_words() -> None:
    options = {"policy": "manual", "router_dp_aware": True, "cors": ["a", "b"], "off": False, "none": None}
    assert router_options(options) == ["--policy", "manual", "--dp-aware", "--cors", "a", "b"]


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
