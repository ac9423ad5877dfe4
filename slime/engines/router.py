"""Run sglang-router (written in Rust, from PyPI) in front of the engines, as a child process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.config.engine import DEFAULT_MODEL, WorkerType
from slime.config.process import module_command
from slime.engines.http import request_blocking
from slime.engines.keys import CONTROL_VARIABLE, send_key, worker_key
from slime.engines.launch import RouterSettings
from slime.engines.process import (
    POLL_SECONDS,
    ServerFailed,
    ServerProcess,
    address_towards,
    free_port,
    without_proxy,
)

WORKER_SECONDS = 60.0
READY_SECONDS = 60.0
FORCED = ("--disable-health-check",)
"""The router's health check is off because slime watches the engines itself. Its circuit breaker
stays on: an engine that fails every request immediately always has the least load, so the policy
``cache_aware`` would send every request to it until slime removes it."""
PING_SECONDS = 10.0
# the number in a row after which a router that runs but does not answer is restarted
MOST_MISSED_PINGS = 3
SECONDS_PER_WORKER = 0.5  # added to the deadline for each worker that is registered


@dataclass(frozen=True)
class Worker:
    """An engine behind a router.

    Attributes:
        model: The served model. Each model has its own router.
        index: The number of the engine, by which rollout workers share the engines.
        bootstrap_port: The port at which a prefill server hands over its KV cache; None for other
            servers.
    """

    url: str
    model: str = DEFAULT_MODEL
    worker_type: WorkerType = "regular"
    bootstrap_port: int | None = None
    index: int = 0


class Router:
    """A running router. Workers are added and removed through its HTTP interface."""

    def __init__(self, url: str) -> None:
        self.url = url

    def workers(self) -> list[dict[str, Any]]:
        """Return what the router reports about each worker: ``id``, ``url``, ``is_healthy`` and
        more.
        """
        return list(_call("GET", f"{self.url}/workers")["workers"])

    def add_workers(self, workers: Sequence[Worker], deadline: float = WORKER_SECONDS) -> None:
        """Register engines, which must be up, and wait until the router routes requests to all of
        them.

        The router registers workers in the background, so all requests are sent before the wait
        begins.

        Args:
            deadline: The time limit in seconds, to which :data:`SECONDS_PER_WORKER` is added for
                each worker.

        Raises:
            ServerFailed: The router did not accept some of the engines in time. The message names
                them.
        """
        for worker in workers:
            body: dict[str, object] = {"url": worker.url}
            if worker.worker_type != "regular":
                body["worker_type"] = worker.worker_type
            if worker.bootstrap_port is not None:
                body["bootstrap_port"] = worker.bootstrap_port
            if (key := worker_key(worker.url)) is not None:
                body["api_key"] = key
            _call("POST", f"{self.url}/workers", body)
        missing = [worker.url for worker in workers]

        def taken() -> bool:
            known = {engine_url(w["url"]) for w in self.workers() if w.get("is_healthy", True)}
            missing[:] = [url for url in missing if url not in known]
            return not missing

        self._wait(
            taken,
            lambda: f"take {', '.join(missing)}",
            deadline + SECONDS_PER_WORKER * len(workers),
        )

    def add_worker(self, worker: Worker | str, deadline: float = WORKER_SECONDS) -> None:
        """Register one engine; see :meth:`add_workers`."""
        self.add_workers([Worker(worker) if isinstance(worker, str) else worker], deadline)

    def remove_worker(self, url: str, deadline: float = WORKER_SECONDS) -> None:
        """Remove an engine, and wait until the router has removed it. An engine that is not
        registered is ignored.
        """
        for worker in self.workers():
            if engine_url(worker["url"]) == url:
                _call("DELETE", f"{self.url}/workers/{worker['id']}")
        known = lambda: {engine_url(worker["url"]) for worker in self.workers()}  # noqa: E731
        self._wait(lambda: url not in known(), lambda: f"forget {url}", deadline)

    def _wait(self, done: Callable[[], bool], what: Callable[[], str], deadline: float) -> None:
        start = time.monotonic()
        while not done():
            if time.monotonic() - start > deadline or not self._lives():
                raise ServerFailed(
                    f"the router at {self.url} did not {what()} within {deadline:.0f} "
                    f"s{self._words()}"
                )
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
        """Return whether the router answers ``GET /liveness``, even with an error, within
        ``timeout`` seconds.
        """
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
    """Start a router, wait until it is up, and register the workers, which must be up already.

    The router ends when the calling process ends, even if the caller is killed. If some workers are
    prefill or decode servers, the router pairs them.

    Raises:
        ServerFailed: The router did not come up, or did not accept a worker.
    """
    port = port or free_port(host)
    # The guard ends the router with this process, which the router cannot watch itself.
    command = [*module_command("slime.engines.guard"), "--parent", str(os.getpid()), "--"]
    command += [*module_command("slime.engines.router_server"), "--host", host, "--port", str(port)]
    # The page of metrics cannot be turned off and has no key, so it is not on the address of this
    # node in the cluster.
    metrics_port = free_port()
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), *FORCED]
    # What the user has given comes last and so takes precedence.
    command += ["--request-timeout-secs", str(settings.request_seconds), *settings.words]
    if any(isinstance(worker, Worker) and worker.worker_type != "regular" for worker in workers):
        command.append("--pd-disaggregation")
    url = f"http://{host}:{port}"
    # The keys reach the router in its environment, which other users cannot read, unlike a command
    # line.
    send_key(url, settings.keys)
    env = (
        without_proxy()
        | settings.keys.environment()
        | {CONTROL_VARIABLE: "\n".join(settings.control_keys)}
    )
    router = RouterProcess(
        "sglang-router", command, url, log_path, env, [("127.0.0.1", metrics_port)]
    )
    # The router is up before the engines are registered, and is not left behind if either fails.
    try:
        router._wait(lambda: router.answers(PING_SECONDS), lambda: "come up", READY_SECONDS)
        router.add_workers(
            [Worker(worker) if isinstance(worker, str) else worker for worker in workers]
        )
    except BaseException:
        router.stop()
        raise
    return router


class Routers:
    """The routers of a run: one per served model, and one per share of the engines for rollout
    workers.

    A share has every ``shares``-th engine. While none of its engines serves, its router has those
    of all other shares.

    Args:
        shares: Number of shares; 0: there are none. Shares need a single model whose engines are
            alike.

    Attributes:
        by_model: The routers in the order of the models. User functions find the address of the
            first one in ``args.sglang_router_ip`` and ``args.sglang_router_port``.
        by_share: The routers of the shares.
    """

    def __init__(self, settings: RouterSettings, log_dir: Path, shares: int = 0) -> None:
        self.settings = settings
        self.log_dir = log_dir
        self.shares = shares
        self.by_model: dict[str, Router] = {}
        self.by_share: dict[str, Router] = {}
        self._serving: dict[str, Worker] = {}  # by URL; only kept for shares
        # workers of a router that slime did not start; stop() removes them there
        self._added: list[Worker] = []
        self._missed: dict[str, int] = {}  # consecutive pings without an answer, by model

    def start(self, workers: Sequence[Worker]) -> None:
        """Start a router on this host for each model of ``workers``.

        If ``--sglang-router-ip`` and ``--sglang-router-port`` are given, that router serves the
        first model instead.
        """
        for model in dict.fromkeys(worker.model for worker in workers):
            own = [worker for worker in workers if worker.model == model]
            if self.settings.address and not self.by_model:
                host, port = self.settings.address
                self.by_model[model] = Router(f"http://{host}:{port}")
                send_key(self.by_model[model].url, self.settings.address_keys)
                # before the call, which may fail after the router has accepted some of them
                self._added += own
                self.by_model[model].add_workers(own)
            else:
                self.by_model[model] = self._start(
                    model, own, address_towards([worker.url for worker in own])
                )
        self._serving = {worker.url: worker for worker in workers}
        for name in _share_names(self.shares):
            own = self._of_share(name)
            self.by_share[name] = self._start(
                name, own, address_towards([worker.url for worker in own])
            )

    def _of_share(self, name: str) -> list[Worker]:
        number = _share_names(self.shares).index(name)
        serving = list(self._serving.values())
        return [worker for worker in serving if worker.index % self.shares == number] or serving

    def _balance(self) -> None:
        """Let the router of each share have the engines that it should have."""
        for name, router in self.by_share.items():
            wanted = {worker.url: worker for worker in self._of_share(name)}
            known = {engine_url(worker["url"]) for worker in router.workers()}
            router.add_workers([worker for url, worker in wanted.items() if url not in known])
            for url in known - wanted.keys():
                router.remove_worker(url)

    @property
    def addresses(self) -> dict[str, tuple[str | None, int | None]]:
        """Host and port of each model's router. User functions find them in
        ``args.sglang_model_routers``.
        """
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
        self._serving[worker.url] = worker
        self._balance()

    def remove_worker(self, url: str) -> None:
        self._serving.pop(url, None)
        try:
            for router in self.by_model.values():
                router.remove_worker(url)
        finally:  # a router that does not answer keeps no other from forgetting the engine
            self._balance()

    def dead(self) -> list[tuple[str, str]]:
        """Return the model (or share) and a description of each router that slime started and that
        has failed.

        A router has failed if its process ended, or if it did not answer :data:`MOST_MISSED_PINGS`
        consecutive pings. The description contains the last log lines. Each call of this method
        sends one ping to each router.
        """
        failed = []
        for model, router in {**self.by_model, **self.by_share}.items():
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
            failed.append((model, f"the router (pid {router.pid}) {what}:\n{router.log_tail()}"))
        return failed

    def restart(self, model: str, workers: Sequence[Worker]) -> None:
        """Start a router that ended or hangs again, at the same address, which clients keep using.

        Args:
            model: The model, or the name of the share, as :meth:`dead` returned it.
            workers: All engines that serve.
        """
        self._serving = {worker.url: worker for worker in workers}
        routers = self.by_share if model in self.by_share else self.by_model
        old = routers[model]
        if isinstance(old, RouterProcess):
            # a hanging router may ignore SIGTERM; its clients' connections are reset, and they
            # retry
            old.kill()
        address = urlsplit(old.url)
        own = [worker for worker in workers if worker.model == model]
        own = self._of_share(model) if model in self.by_share else own
        routers[model] = self._start(model, own, address.hostname or "", address.port)
        self._missed[model] = 0
        # another one that has failed is restarted next
        with contextlib.suppress(ServerFailed, OSError):
            self._balance()

    def stop(self) -> None:
        """Stop the routers that slime started, and remove the engines of this run from a router
        that it did not.
        """
        for router in (*self.by_model.values(), *self.by_share.values()):
            if isinstance(router, RouterProcess):
                router.stop()
        for worker in self._added:
            with contextlib.suppress(ServerFailed, OSError):
                self.by_model[worker.model].remove_worker(worker.url)

    def _start(
        self, model: str, workers: Sequence[Worker], host: str, port: int | None = None
    ) -> RouterProcess:
        name = "router.log" if model == DEFAULT_MODEL else f"router-{model}.log"
        return start_router(self.settings, workers, host, port, self.log_dir / name)


def _share_names(shares: int) -> list[str]:
    return [f"share-{number}" for number in range(shares)]


def engine_url(worker_url: str) -> str:
    """Return the address of the engine of a worker.

    With ``--router-dp-aware`` the router has one worker for each data-parallel rank of an engine,
    ``http://host:port@rank``.
    """
    return re.sub(r"@\d+$", "", worker_url)


def _call(method: str, url: str, body: object = None, timeout: float = 10.0) -> Any:
    status, raw = request_blocking(method, url, body, timeout)
    if status >= 400:
        raise ServerFailed(f"{method} {url} answered {status}: {raw.decode(errors='replace')}")
    return json.loads(raw) if raw else None
