"""sglang-router (Rust, from PyPI) in front of the engines, as a child process."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.engines.process import POLL_SECONDS, ServerFailed, ServerProcess, free_port

if TYPE_CHECKING:
    from slime.config.args import Args

WORKER_SECONDS = 60.0
READY_SECONDS = 60.0
DEFAULTS: dict[str, Any] = {
    "policy": "cache_aware",
    "balance_abs_threshold": 10,
    "balance_rel_threshold": 1.2,
    "log_level": "warn",
}
"""What slime sets unless ``--router-…`` says otherwise (contract, arguments 1.15)."""
FORCED = ("--disable-circuit-breaker", "--disable-health-check")
"""slime watches the engines itself; a router that benches one for good would get in its way."""


class RouterProcess(ServerProcess):
    """A running router; workers come and go through its own HTTP interface."""

    def workers(self) -> list[dict[str, Any]]:
        """What the router knows: ``id``, ``url``, ``is_healthy``, … per worker."""
        return list(_call("GET", f"{self.url}/workers")["workers"])

    def add_worker(self, url: str, deadline: float = WORKER_SECONDS) -> None:
        """Register an engine that is up; returns when the router routes to it (the call itself is asynchronous).

        Raises:
            ServerFailed: it did not within ``deadline`` seconds.
        """
        _call("POST", f"{self.url}/workers", {"url": url})
        self._wait(
            lambda: any(w["url"] == url and w.get("is_healthy", True) for w in self.workers()), f"take {url}", deadline
        )

    def remove_worker(self, url: str, deadline: float = WORKER_SECONDS) -> None:
        """Forget an engine; a no-op when the router does not know it."""
        for worker in self.workers():
            if worker["url"] == url:
                _call("DELETE", f"{self.url}/workers/{worker['id']}")
        self._wait(lambda: all(worker["url"] != url for worker in self.workers()), f"forget {url}", deadline)

    def _wait(self, done: Any, what: str, deadline: float) -> None:
        start = time.monotonic()
        while not done():
            if not self.alive() or time.monotonic() - start > deadline:
                state = "alive" if self.alive() else "dead"
                raise ServerFailed(f"the router ({state}) did not {what} within {deadline:.0f} s:\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)


def start_router(
    args: Args,
    worker_urls: Sequence[str],
    host: str = "127.0.0.1",
    port: int | None = None,
    log_path: str | Path | None = None,
) -> RouterProcess:
    """Start a router, wait for it, and register the workers, which must be up.

    ``args.router`` holds the ``--router-…`` options as given; they win over :data:`DEFAULTS`. The router ends
    when the calling process does, also when that is killed.

    Raises:
        ServerFailed: it did not come up, or did not take a worker.
    """
    port = port or free_port(host)
    command = [sys.executable, "-m", "slime.engines.guard", "--parent", str(os.getpid()), "--"]
    command += [sys.executable, "-m", "sglang_router.launch_router", "--host", host, "--port", str(port)]
    command += ["--prometheus-host", host, "--prometheus-port", str(free_port(host)), *FORCED]
    command += ["--request-timeout-secs", str(getattr(args, "sglang_router_request_timeout_secs", None) or 14400)]
    command += router_options({**DEFAULTS, **(getattr(args, "router", None) or {})})
    router = RouterProcess("sglang-router", command, f"http://{host}:{port}", log_path, {})
    try:
        router._wait(lambda: _up(router.url), "come up", READY_SECONDS)
        for url in worker_urls:
            router.add_worker(url)
    except BaseException:
        router.stop()
        raise
    return router


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
        with urllib.request.urlopen(message, timeout=timeout) as answer:
            raw = answer.read()
    except urllib.error.HTTPError as error:
        raise ServerFailed(f"{method} {url} answered {error.code}: {error.read().decode(errors='replace')}") from error
    return json.loads(raw) if raw else None
