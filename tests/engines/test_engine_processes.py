"""Server processes come up, end, and never stay behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine_parts import engine_settings, router_settings

from slime.engines.handle import EngineHandle
from slime.engines.payload import Bucket
from slime.engines.process import EngineProcess, ServerFailed
from slime.plugins.embedded.server import start_embedded_engine
from slime.utils.async_utils import run

pytestmark = pytest.mark.real


def gone(pid: int) -> bool:
    """No such process, or only its entry is left (the test's container may have nobody who reaps
    orphans).
    """
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pids: list[int], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < end, [pid for pid in pids if not gone(pid)]
        time.sleep(0.05)


PARENT = """
import sys, time, pickle
sys.path[:0] = {path!r}
from engine_parts import engine_settings, router_settings
from pathlib import Path
from slime.plugins.embedded.server import start_embedded_engine
from slime.engines.router import start_router
engine = start_embedded_engine(engine_settings(Path({model!r})), 0)
engine.wait_ready(100)
router = start_router(router_settings(), [engine.url])
print(engine.pid, router.pid, flush=True)
time.sleep(300)
"""


def test_engine_and_router_die_with_a_killed_parent(tiny_llama: Path) -> None:
    script = PARENT.format(
        path=[entry for entry in sys.path if "tests" in entry], model=str(tiny_llama)
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        children = [
            child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)
        ]
        assert children  # the router itself, below its guard
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        wait_gone([*pids, *children])
    finally:
        parent.kill()
        parent.wait(10)


def test_router_dies_with_its_guard(tiny_llama: Path) -> None:
    from slime.engines.router import start_router

    router = start_router(router_settings(), [])
    try:
        children = [child.pid for child in psutil.Process(router.pid).children(recursive=True)]
        os.kill(router.pid, signal.SIGKILL)
        wait_gone([router.pid, *children])
    finally:
        router.stop()


def test_stop_ends_a_busy_engine(
    start_engine: Callable[..., EngineProcess], tiny_llama: Path
) -> None:
    import asyncio

    engine = start_engine(tiny_llama, spawned=True)
    handle = EngineHandle(engine.url)

    async def busy() -> Any:
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        running = asyncio.ensure_future(handle.generate(body))
        await asyncio.sleep(0.1)
        return running

    running = run(busy())
    engine.stop()
    assert engine.child.returncode in (0, -signal.SIGTERM)  # no SIGKILL was needed

    async def drain() -> None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(running, 5)

    run(drain())


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    engine = start_embedded_engine(
        engine_settings(tmp_path / "nothing"), 3, log_path=tmp_path / "log"
    )
    try:
        with pytest.raises(ServerFailed, match=r"embedded engine 3 .*(?s:.)*does not exist"):
            engine.wait_ready(60)
    finally:
        engine.stop()


def test_updates_leave_no_shared_memory_behind(
    start_engine: Callable[..., EngineProcess], tiny_llama: Path
) -> None:
    """Nor does an engine that is killed after one."""
    engine = start_engine(tiny_llama, spawned=True)
    handle = EngineHandle(engine.url)
    before = set(os.listdir("/dev/shm"))

    async def update() -> None:
        await handle.begin_update()
        bucket = Bucket(0, [("model.norm.weight", torch.ones(44))], last=True)
        await handle.push(bucket, "s")
        await handle.end_update("s")

    for _ in range(3):
        run(update())
    ours = {
        name
        for name in set(os.listdir("/dev/shm")) - before
        if name.startswith(f"torch_{os.getpid()}_")
    }
    assert not ours
    os.kill(engine.pid, signal.SIGKILL)
    engine.child.wait(10)
    left = set(os.listdir("/dev/shm")) - before
    assert not {
        name for name in left if name.startswith((f"torch_{os.getpid()}_", f"torch_{engine.pid}_"))
    }


def test_clients_import_no_heavy_library() -> None:
    code = (
        "import sys, slime.engines.process, slime.engines.router, slime.engines.handle, "
        "slime.engines.guard;import slime.utils.http_utils, slime.utils.async_utils;heavy = "
        "{'torch', 'transformers', 'aiohttp', 'ray', 'numpy'} & set(sys.modules); assert not "
        "heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
