"""Start an embedded engine: in a process of its own, or on threads of this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from slime.config.process import ONE_AT_A_TIME, module_command
from slime.engines import local
from slime.engines.keys import send_key
from slime.engines.launch import EngineSettings, EngineSpec
from slime.engines.process import (
    EngineProcess,
    ServerFailed,
    free_port,
    release_port,
    without_proxy,
)
from slime.models.cpu_memory import large_imports


def start(
    settings: EngineSettings,
    spec: EngineSpec,
    host: str,
    log_path: str | Path | None,
    gpu_ids: Sequence[int] | None,
    node: tuple[int, int, str | None],
) -> EngineProcess | EngineThread:
    """Start the engine of ``spec``; see :func:`slime.engines.launch.start_engine`."""
    if settings.inline is not None:
        return EngineThread(settings, spec.index, log_path, listens=settings.inline == "port")
    return start_embedded_engine(settings, spec.index, host, log_path=log_path)


def start_embedded_engine(
    settings: EngineSettings,
    index: int,
    host: str = "127.0.0.1",
    port: int | None = None,
    log_path: str | Path | None = None,
) -> EngineProcess:
    """Start embedded engine number ``index`` and return immediately; see
    :meth:`ServerProcess.wait_ready`.

    The engine ends when the calling process ends, even if the caller is killed.
    """
    port = port or free_port(host)
    # The server watches this process and ends with it.
    command = [*module_command("slime.plugins.embedded.server"), "--parent-pid", str(os.getpid())]
    command += ["--model-path", settings.model, "--host", host, "--port", str(port)]
    # Options that are None have the default of the server.
    options = {
        "--dtype": settings.dtype,
        "--device": settings.device,
        "--max-running-requests": settings.max_running_requests,
        "--max-total-tokens": settings.max_total_tokens,
        "--threads": settings.threads,
        "--kernels": settings.kernels,
    }
    for name, value in options.items():
        if value is not None:
            command += [name, str(value)]
    if settings.deterministic:
        command.append("--deterministic")
    if settings.trust_remote_code:
        command.append("--trust-remote-code")
    # Keys are in the environment, which other users cannot read.
    env = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    env |= without_proxy(settings.model, host) | settings.keys.environment()
    if settings.threads:
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(settings.threads)
    url = f"http://{host}:{port}"
    send_key(url, settings.keys)
    return EngineProcess(f"embedded engine {index}", command, url, log_path, env)


HOST = "127.0.0.1"
START_POLL_SECONDS = 0.02
STOP_SECONDS = 30.0


class EngineThread:
    """What :class:`~slime.engines.process.EngineProcess` is for a process.

    Args:
        listens: Whether the engine listens on a port as well, for functions of the user that have
            HTTP clients of their own.

    Attributes:
        pid: The id of this process.
        fate: Always empty: nobody kills a thread.
    """

    bootstrap_port: int | None = None
    fate = ""

    def __init__(
        self, settings: EngineSettings, index: int, log_path: str | Path | None, listens: bool
    ) -> None:
        self.what = f"embedded engine {index}"
        self.settings = settings
        self.listens = listens
        self.log_path = Path(log_path) if log_path else None
        self.pid = os.getpid()
        self.port = free_port(HOST) if listens else 1 + index
        self.host = HOST if listens else f"engine-{index}.inline"
        self.url = f"http://{self.host}:{self.port}"
        send_key(self.url, settings.keys)
        self.loop = asyncio.new_event_loop()
        self.failure: BaseException | None = None
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=self.what, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException as error:
            self.failure = error
        finally:
            local.withdraw(self.url)
            self.loop.close()

    async def _serve(self) -> None:
        settings = self.settings
        # Load the model. Imports of several threads at the same time would get in each other's way.
        with ONE_AT_A_TIME, large_imports():
            import torch

            from slime.plugins.embedded.app import SERVING, make_app
            from slime.plugins.embedded.loading import EngineOptions, load_engine

            if settings.threads:
                # of the model thread, which has computed nothing so far
                torch.set_num_threads(settings.threads)
            options = EngineOptions.of(
                model_path=settings.model,
                dtype=settings.dtype,
                device=settings.device,
                max_running_requests=settings.max_running_requests,
                max_total_tokens=settings.max_total_tokens,
                deterministic=settings.deterministic,
                trust_remote_code=settings.trust_remote_code,
                kernels=settings.kernels,
            )
            loaded = load_engine(options)
        # Serve it: to clients of this process without a port, and on a port if asked.
        runner = web.AppRunner(make_app(loaded, self.host, settings.keys), **SERVING)
        await runner.setup()
        self._stop = asyncio.Event()
        try:
            assert runner.server is not None
            local.serve(self.url, self.loop, runner.server)
            if self.listens:
                await web.TCPSite(runner, HOST, self.port).start()
            self._ready.set()
            await self._stop.wait()
        finally:
            # End the model's thread, and leave nothing of the model in memory.
            await runner.cleanup()
            # aiohttp caches applications, and with them the model would stay in memory
            vars(loaded).clear()
            if self.listens:
                release_port(HOST, self.port)

    def alive(self) -> bool:
        return self._thread.is_alive()

    def wait_ready(self, deadline: float) -> None:
        """Wait until the engine answers.

        Raises:
            ServerFailed: It could not be loaded, or the deadline passed.
        """
        until = time.monotonic() + deadline
        while not self._ready.wait(START_POLL_SECONDS):
            if not self.alive():
                raise ServerFailed(
                    f"{self.what} could not be started:\n{self.log_tail()}"
                ) from self.failure
            if time.monotonic() > until:
                raise ServerFailed(f"{self.what} was not ready after {deadline:.0f} s")

    def stop(self) -> None:
        """End the engine, and wait until its threads have ended."""
        if self._stop is not None and self.alive():
            with contextlib.suppress(RuntimeError):  # its loop has ended meanwhile
                self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(STOP_SECONDS)

    def kill(self) -> None:
        self.stop()

    def cpu_seconds(self) -> float:
        """Return the CPU time of this whole process: that of a thread alone is not known."""
        return time.process_time()

    def log_tail(self) -> str:
        """Return the error that has ended the engine; its log lines are with those of the run."""
        if self.failure is None:
            return "(it has not failed)"
        print("".join(traceback.format_exception(self.failure)), file=sys.stderr)
        return f"{type(self.failure).__name__}: {self.failure}"
