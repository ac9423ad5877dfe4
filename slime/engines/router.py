"""sglang-router (Rust, from PyPI) in front of the engines, as a child process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.config.engine import DEFAULT_MODEL, WorkerType
from slime.engines.http import request_blocking
from slime.engines.process import POLL_SECONDS, ServerFailed, ServerProcess, address_towards, free_port, without_proxy
from slime.engines.settings import RouterSettings

WORKER_SECONDS = 60.0
READY_SECONDS = 60.0
FORCED = ("--disable-health-check",)
"""slime watches the engines itself. The circuit breaker stays on: an engine that fails at once always has the least
load, so without it ``cache_aware`` would send every request there until the engine is taken out."""
PING_SECONDS = 10.0
MOST_MISSED_PINGS = 3  # in a row; then a router that lives but does not answer is started again
SECONDS_PER_WORKER = 0.5  # more for each worker that is registered together with others


@dataclass(frozen=True)
class Worker:
    """An engine behind a router.

    Attributes:
        model: the served model, and so the router that it stands behind.
        bootstrap_port: of a prefill server.
    """

    url: str
    model: str = DEFAULT_MODEL
    worker_type: WorkerType = "regular"
    bootstrap_port: int | None = None


class Router:
    """A running router; workers are added and removed through its HTTP interface."""

    def __init__(self, url: str) -> None:
        self.url = url

    def workers(self) -> list[dict[str, Any]]:
        """What the router reports of each worker: ``id``, ``url``, ``is_healthy``, …"""
        return list(_call("GET", f"{self.url}/workers")["workers"])

    def add_workers(self, workers: Sequence[Worker], deadline: float = WORKER_SECONDS) -> None:
        """Register engines that are up; returns when the router routes to all of them.

        The router registers in the background, so all are announced before the first is waited for.

        Args:
            deadline: seconds; :data:`SECONDS_PER_WORKER` more for each worker.

        Raises:
            ServerFailed: it does not route to some of them by then; the message names them.
        """
        for worker in workers:
            body: dict[str, object] = {"url": worker.url}
            if worker.worker_type != "regular":
                body["worker_type"] = worker.worker_type
            if worker.bootstrap_port is not None:
                body["bootstrap_port"] = worker.bootstrap_port
            _call("POST", f"{self.url}/workers", body)
        missing = [worker.url for worker in workers]

        def taken() -> bool:
            known = {engine_url(w["url"]) for w in self.workers() if w.get("is_healthy", True)}
            missing[:] = [url for url in missing if url not in known]
            return not missing

        self._wait(taken, lambda: f"take {', '.join(missing)}", deadline + SECONDS_PER_WORKER * len(workers))

    def add_worker(self, worker: Worker | str, deadline: float = WORKER_SECONDS) -> None:
        """:meth:`add_workers` for one engine."""
        self.add_workers([Worker(worker) if isinstance(worker, str) else worker], deadline)

    def remove_worker(self, url: str, deadline: float = WORKER_SECONDS) -> None:
        """Forget an engine; a no-op when the router does not know it."""
        for worker in self.workers():
            if engine_url(worker["url"]) == url:
                _call("DELETE", f"{self.url}/workers/{worker['id']}")
        known = lambda: {engine_url(worker["url"]) for worker in self.workers()}  # noqa: E731
        self._wait(lambda: url not in known(), lambda: f"forget {url}", deadline)

    def _wait(self, done: Callable[[], bool], what: Callable[[], str], deadline: float) -> None:
        start = time.monotonic()
        while not done():
            if time.monotonic() - start > deadline or not self._lives():
                raise ServerFailed(f"the router at {self.url} did not {what()} within {deadline:.0f} s{self._words()}")
            time.sleep(POLL_SECONDS)

    def _lives(self) -> bool:
        return True

    def _words(self) -> str:
        return ""


class RouterProcess(ServerProcess, Router):
    """A router that slime started."""

    def _lives(self) -> bool:
        return self.alive()

    def _words(self) -> str:
        return f" ({'alive' if self.alive() else 'dead'}):\n{self.log_tail()}"

    def answers(self, timeout: float) -> bool:
        """Whether it answers ``GET /liveness`` in any way within ``timeout`` seconds."""
        try:
            _call("GET", f"{self.url}/liveness", timeout=timeout)
        except OSError:
            return False
        except (ServerFailed, ValueError):
            return True
        return True


def start_router(
    settings: RouterSettings,
    workers: Sequence[Worker | str],
    host: str = "127.0.0.1",
    port: int | None = None,
    log_path: str | Path | None = None,
) -> RouterProcess:
    """Start a router, wait for it, and register the workers, which must be up.

    The router ends when the calling process does, also when that is killed. Where a worker
    only prefills, it pairs prefill and decode servers.

    Raises:
        ServerFailed: it did not come up, or did not take a worker.
    """
    port = port or free_port(host)
    command = [sys.executable, "-m", "slime.engines.guard", "--parent", str(os.getpid()), "--"]
    command += [sys.executable, "-m", "sglang_router.launch_router", "--host", host, "--port", str(port)]
    metrics_port = free_port(host)
    command += ["--prometheus-host", host, "--prometheus-port", str(metrics_port), *FORCED]
    command += ["--request-timeout-secs", str(settings.request_seconds), *settings.words]
    if any(isinstance(worker, Worker) and worker.worker_type != "regular" for worker in workers):
        command.append("--pd-disaggregation")
    router = RouterProcess(
        "sglang-router", command, f"http://{host}:{port}", log_path, without_proxy(), [(host, metrics_port)]
    )
    try:
        router._wait(lambda: router.answers(PING_SECONDS), lambda: "come up", READY_SECONDS)
        router.add_workers([Worker(worker) if isinstance(worker, str) else worker for worker in workers])
    except BaseException:
        router.stop()
        raise
    return router


class Routers:
    """The routers of a run: one per served model, started where there are none yet.

    Attributes:
        by_model: in the order of the models; users' functions find the first one's address in
            ``args.sglang_router_ip`` and ``args.sglang_router_port``.
    """

    def __init__(self, settings: RouterSettings, log_dir: Path) -> None:
        self.settings, self.log_dir = settings, log_dir
        self.by_model: dict[str, Router] = {}
        self._added: list[Worker] = []
        self._missed: dict[str, int] = {}  # pings in a row, by model

    def start(self, workers: Sequence[Worker]) -> None:
        """A router on this host for each model of ``workers``; the first model's is ``--sglang-router-ip/port`` where
        given."""
        for model in dict.fromkeys(worker.model for worker in workers):
            own = [worker for worker in workers if worker.model == model]
            if self.settings.address and not self.by_model:
                host, port = self.settings.address
                self.by_model[model] = Router(f"http://{host}:{port}")
                self._added += own  # before: it may take some of them and then fail
                self.by_model[model].add_workers(own)
            else:
                self.by_model[model] = self._start(model, own, address_towards([worker.url for worker in own]))

    @property
    def addresses(self) -> dict[str, tuple[str | None, int | None]]:
        """Host and port of each model's router: ``args.sglang_model_routers`` in users' functions."""
        parts = {model: urlsplit(router.url) for model, router in self.by_model.items()}
        return {model: (url.hostname, url.port) for model, url in parts.items()}

    @property
    def url(self) -> str:
        """The URL of the first model's router."""
        return next(iter(self.by_model.values())).url

    def add_worker(self, worker: Worker) -> None:
        router = self.by_model[worker.model]
        router.add_worker(worker)
        if not isinstance(router, RouterProcess):
            self._added.append(worker)

    def remove_worker(self, url: str) -> None:
        for router in self.by_model.values():
            router.remove_worker(url)

    def dead(self) -> list[tuple[str, str]]:
        """The model and the last log lines of each router of ours that has ended, or has not answered the last
        :data:`MOST_MISSED_PINGS` calls."""
        found = []
        for model, router in self.by_model.items():
            if not isinstance(router, RouterProcess):
                continue
            if not router.alive():
                what = f"ended with {router.child.returncode}"
            elif router.answers(PING_SECONDS):
                self._missed[model] = 0
                continue
            else:
                self._missed[model] = self._missed.get(model, 0) + 1
                if self._missed[model] < MOST_MISSED_PINGS:
                    continue
                what = f"did not answer {MOST_MISSED_PINGS} times within {PING_SECONDS:.0f} s"
            found.append((model, f"the router (pid {router.pid}) {what}:\n{router.log_tail()}"))
        return found

    def restart(self, model: str, workers: Sequence[Worker]) -> None:
        """Start a router that ended or hangs again, at its address."""
        old = self.by_model[model]
        if isinstance(old, RouterProcess):
            old.kill()  # it may be stopped; its clients' connections are reset, and they ask again
        address = urlsplit(old.url)
        own = [worker for worker in workers if worker.model == model]
        self.by_model[model] = self._start(model, own, address.hostname or "", address.port)
        self._missed[model] = 0

    def stop(self) -> None:
        """End our routers; take our engines out of one that is not ours."""
        for router in self.by_model.values():
            if isinstance(router, RouterProcess):
                router.stop()
        for worker in self._added:
            with contextlib.suppress(ServerFailed, OSError):
                self.by_model[worker.model].remove_worker(worker.url)

    def _start(self, model: str, workers: Sequence[Worker], host: str, port: int | None = None) -> RouterProcess:
        name = "router.log" if model == DEFAULT_MODEL else f"router-{model}.log"
        return start_router(self.settings, workers, host, port, self.log_dir / name)


def engine_url(worker_url: str) -> str:
    """The engine's own address. With ``--router-dp-aware`` the router lists each data-parallel rank of an engine as a
    worker of its own, ``http://host:port@rank``."""
    return re.sub(r"@\d+$", "", worker_url)


def _call(method: str, url: str, body: object = None, timeout: float = 10.0) -> Any:
    status, raw = request_blocking(method, url, body, timeout)
    if status >= 400:
        raise ServerFailed(f"{method} {url} answered {status}: {raw.decode(errors='replace')}")
    return json.loads(raw) if raw else None
