"""sglang-router (Rust, from PyPI) in front of the engines, as a child process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slime.config.engine import DEFAULT_MODEL, WorkerType
from slime.engines.process import (
    POLL_SECONDS,
    ServerFailed,
    ServerProcess,
    address_towards,
    free_port,
    without_proxy,
)

if TYPE_CHECKING:
    from slime.config.args import Args

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # urlopen would obey $http_proxy
WORKER_SECONDS = 60.0
READY_SECONDS = 60.0
DEFAULTS: dict[str, Any] = {
    "policy": "cache_aware",
    "balance_abs_threshold": 10,
    "balance_rel_threshold": 1.2,
    "log_level": "warn",
    # The circuit breaker counts 4xx as failures. A series of requests that no engine takes would bench all of them:
    # then for seconds, not for a minute. A bad engine costs a few retries each time that it is tried again.
    "cb_timeout_duration_secs": 5,
}
"""What slime sets unless ``--router-…`` says otherwise (contract, arguments 1.15)."""
FORCED = ("--disable-health-check",)
"""slime watches the engines itself. The circuit breaker stays on: an engine that fails at once always has the least
load, so without it ``cache_aware`` would send every request there until the engine is taken out."""
PING_SECONDS = 10.0
MOST_MISSED_PINGS = 3  # in a row; then a router that lives but does not answer is started again
SECONDS_PER_WORKER = 0.5  # more for each worker that is registered together with others


@dataclass(frozen=True)
class Worker:
    """An engine as a router sees it.

    Attributes:
        model: the served model, and so the router that it stands behind.
        bootstrap_port: of a prefill server.
    """

    url: str
    model: str = DEFAULT_MODEL
    worker_type: WorkerType = "regular"
    bootstrap_port: int | None = None


class Router:
    """A router that runs somewhere; workers come and go through its own HTTP interface."""

    def __init__(self, url: str) -> None:
        self.url = url

    def workers(self) -> list[dict[str, Any]]:
        """What the router knows: ``id``, ``url``, ``is_healthy``, … per worker."""
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
            body: dict[str, Any] = {"url": worker.url}
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
    """A router of ours."""

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
    args: Args,
    workers: Sequence[Worker | str],
    host: str = "127.0.0.1",
    port: int | None = None,
    log_path: str | Path | None = None,
) -> RouterProcess:
    """Start a router, wait for it, and register the workers, which must be up.

    ``args.router`` holds the ``--router-…`` options as given; they win over :data:`DEFAULTS`. The router ends
    when the calling process does, also when that is killed. Where a worker only prefills, it pairs prefill and
    decode servers.

    Raises:
        ServerFailed: it did not come up, or did not take a worker.
    """
    port = port or free_port(host)
    command = [sys.executable, "-m", "slime.engines.guard", "--parent", str(os.getpid()), "--"]
    command += [sys.executable, "-m", "sglang_router.launch_router", "--host", host, "--port", str(port)]
    metrics_port = free_port(host)
    command += ["--prometheus-host", host, "--prometheus-port", str(metrics_port), *FORCED]
    command += ["--request-timeout-secs", str(getattr(args, "sglang_router_request_timeout_secs", None) or 14400)]
    command += router_options({**DEFAULTS, **(getattr(args, "router", None) or {})})
    if any(isinstance(worker, Worker) and worker.worker_type != "regular" for worker in workers):
        command.append("--pd-disaggregation")
    router = RouterProcess(
        "sglang-router", command, f"http://{host}:{port}", log_path, without_proxy(), [(host, metrics_port)]
    )
    try:
        router._wait(lambda: _up(router.url), lambda: "come up", READY_SECONDS)
        router.add_workers([Worker(worker) if isinstance(worker, str) else worker for worker in workers])
    except BaseException:
        router.stop()
        raise
    return router


class Routers:
    """The routers of a run: one per served model, started where there are none yet.

    Attributes:
        by_model: in the order of the models; the first one's address is ``args.sglang_router_ip/port``.
    """

    def __init__(self, args: Args, log_dir: Path) -> None:
        self.args, self.log_dir = args, log_dir
        self.by_model: dict[str, Router] = {}
        self._added: list[Worker] = []
        self._missed: dict[str, int] = {}  # pings in a row, by model

    def start(self, workers: Sequence[Worker]) -> None:
        """A router on this host for each model of ``workers``; the first model's is ``--sglang-router-ip/port`` where
        given."""
        for model in dict.fromkeys(worker.model for worker in workers):
            own = [worker for worker in workers if worker.model == model]
            if self.args.sglang_router_ip and not self.by_model:
                self.by_model[model] = Router(f"http://{self.args.sglang_router_ip}:{self.args.sglang_router_port}")
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
        """Of the first model's router."""
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
        """Model and last words of our routers that ended, or that live and have not answered the last
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
        return start_router(self.args, workers, host, port, self.log_dir / name)


def router_options(options: dict[str, Any]) -> list[str]:
    """``{"balance_abs_threshold": 10, "dp_aware": True}`` as command-line words."""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.removeprefix("router_").replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


def engine_url(worker_url: str) -> str:
    """The engine's own address. With ``--router-dp-aware`` the router lists each data-parallel rank of an engine as a
    worker of its own, ``http://host:port@rank``."""
    return re.sub(r"@\d+$", "", worker_url)


def _up(url: str) -> bool:
    try:
        _call("GET", f"{url}/workers")
    except (OSError, ServerFailed):
        return False
    return True


def _call(method: str, url: str, body: Any = None, timeout: float = 10.0) -> Any:
    data = None if body is None else json.dumps(body).encode()
    message = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with _OPENER.open(message, timeout=timeout) as answer:
            raw = answer.read()
    except urllib.error.HTTPError as error:
        raise ServerFailed(f"{method} {url} answered {error.code}: {error.read().decode(errors='replace')}") from error
    except http.client.HTTPException as error:
        raise ConnectionError(f"{method} {url}: {error or type(error).__name__}") from error
    return json.loads(raw) if raw else None
