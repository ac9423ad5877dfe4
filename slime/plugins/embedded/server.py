"""``python -m slime.plugins.embedded.server``: the process of one embedded engine; and what starts it,
or the same engine on threads of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from aiohttp import web

from slime.config.process import ONE_AT_A_TIME, end_with_parent, module_command
from slime.engines import local
from slime.engines.keys import API_VARIABLE, ServerKeys, send_key
from slime.engines.launch import EngineSettings, EngineSpec
from slime.engines.process import (
    EngineProcess,
    ServerFailed,
    free_port,
    release_port,
    without_proxy,
)
from slime.models.cpu_memory import large_imports, set_compute_variables
from slime.plugins.embedded.served import ENGINES_SERVING


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
    log_path: str | Path | None = None,
) -> EngineProcess:
    """Start embedded engine number ``index`` and return immediately; see
    :meth:`ServerProcess.wait_ready`.

    The engine ends when the calling process ends, even if the caller is killed.
    """
    port = free_port(host)
    # The server watches this process and ends with it.
    command = [*module_command("slime.plugins.embedded.server"), "--parent-pid", str(os.getpid())]
    # Options that are None have the default of the server.
    for name, value in [*_options(settings).items(), ("threads", settings.threads)]:
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            command += [option] if value else []
        elif value is not None:
            command += [option, str(value)]
    command += ["--host", host, "--port", str(port)]
    # Keys are in the environment, which other users cannot read.
    env = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    env |= without_proxy(settings.model, host) | settings.keys.environment()
    if settings.threads:
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(settings.threads)
    url = f"http://{host}:{port}"
    send_key(url, settings.keys)
    return EngineProcess(f"embedded engine {index}", command, url, log_path, env)


def _options(settings: EngineSettings) -> dict[str, str | int | bool | None]:
    """Return the options about the model, as EngineOptions and the command line name them."""
    return {
        "model_path": settings.model,
        "dtype": settings.dtype,
        "device": settings.device,
        "max_running_requests": settings.max_running_requests,
        "max_total_tokens": settings.max_total_tokens,
        "deterministic": settings.deterministic,
        "trust_remote_code": settings.trust_remote_code,
        "kernels": settings.kernels,
    }


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

            from slime.plugins.embedded.app import make_app
            from slime.plugins.embedded.loading import EngineOptions, load_engine

            if settings.threads:
                # of the model thread, which has computed nothing so far
                torch.set_num_threads(settings.threads)
            loaded = load_engine(EngineOptions.of(**_options(settings)))
        # Serve it: to clients of this process without a port, and on a port if asked.
        runner = web.AppRunner(make_app(loaded, self.host, settings.keys), **ENGINES_SERVING)
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


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. Options that SGLang has too have SGLang's names."""
    key = (
        f"The environment variable {API_VARIABLE} is the key that requests must have; without it, "
        "there is no key."
    )
    parser = argparse.ArgumentParser(
        prog="python -m slime.plugins.embedded.server", description=__doc__, epilog=key
    )
    parser.add_argument("--model-path", required=True, help="Hugging Face folder or hub id")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: float32 on CPU, else bfloat16",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument(
        "--max-total-tokens", type=int, help="bound of the KV cache; default: by free memory"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="results do not depend on the rest of the batch",
    )
    parser.add_argument(
        "--threads", type=int, help="CPU threads; default: OMP_NUM_THREADS, else the cores"
    )
    parser.add_argument("--kernels", help="a registered part of the kind `kernels`")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--random-seed", type=int, default=0)
    parser.add_argument("--parent-pid", type=int, help="end when this process, our parent, is gone")
    parser.add_argument("--log-level", default="info")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Load the model, then serve until SIGTERM or SIGINT."""
    started = time.perf_counter()
    keys = ServerKeys.take_from_environment()
    options = build_parser().parse_args(argv)
    if options.parent_pid:
        end_with_parent(options.parent_pid)
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
    set_compute_variables()
    logging.basicConfig(
        level=options.log_level.upper(),
        format="[%(asctime)s] %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    _serve(options, keys, started)


def _serve(options: argparse.Namespace, keys: ServerKeys, started: float) -> None:
    with large_imports():
        import torch

        from slime.plugins.embedded.app import make_app
        from slime.plugins.embedded.loading import EngineOptions, load_engine

    if options.threads:
        torch.set_num_threads(options.threads)
    torch.multiprocessing.set_sharing_strategy("file_system")
    # the model thread needs the interpreter lock again after each operator
    sys.setswitchinterval(0.001)
    loaded = load_engine(
        EngineOptions.of(
            **{field.name: getattr(options, field.name) for field in fields(EngineOptions)}
        )
    )
    app = make_app(loaded, options.host, keys)

    async def announce(app: web.Application) -> None:
        logging.getLogger(__name__).info("ready after %.1f s", time.perf_counter() - started)

    app.on_startup.append(announce)
    web.run_app(app, host=options.host, port=options.port, print=None, **ENGINES_SERVING)


if __name__ == "__main__":
    main()
