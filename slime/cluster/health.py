"""Notice engines that ended, hang or cannot be reached."""

from __future__ import annotations

import contextlib
import http.client
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from slime.cluster.engine_fleet import EngineFleet

logger = logging.getLogger(__name__)
LOOK_SECONDS = 1.0  # between looks at processes, which cost nothing
AGAIN_SECONDS = 1.0
PATIENCE = 3  # checks in a row that a run without fault tolerance lets an engine miss before it ends


class HealthMonitor:
    """A thread that looks at all engines of a fleet.

    Whether processes live is asked every second; whether an engine makes tokens (``/health_generate``) every
    ``interval`` seconds, by threads and sockets of its own, so that a busy event loop never makes a healthy
    engine look dead. Nothing is looked at while :meth:`paused` or :meth:`pause` is in force: engines that load
    weights or have released their memory make no tokens.

    Args:
        interval: seconds between checks.
        timeout: seconds an engine has to make a token.
        first_wait: seconds of grace after each pause.
    """

    def __init__(self, fleet: EngineFleet, interval: float, timeout: float, first_wait: float) -> None:
        self.fleet, self.interval, self.timeout, self.first_wait = fleet, interval, timeout, first_wait
        self.missed: dict[str, int] = {}  # checks in a row, by URL
        self._reasons: set[str] = set()
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._next = time.monotonic() + max(first_wait, interval)
        self._thread = threading.Thread(target=self._work, name="engine-health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def pause(self, reason: str) -> None:
        """Look away until :meth:`resume`; returns when no look is under way."""
        with self._looking:
            self._reasons.add(reason)

    def resume(self, reason: str) -> None:
        with self._looking:
            self._reasons.discard(reason)
            self.missed.clear()
            self._next = time.monotonic() + self.first_wait

    @contextlib.contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        self.pause(reason)
        try:
            yield
        finally:
            self.resume(reason)

    def _work(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            try:
                with self._looking:
                    if not self._reasons:
                        self.look()
            except Exception:  # the watchman stays, whatever he sees
                logger.exception("the health monitor failed")

    def look(self) -> None:
        """One look: processes, then (when it is time) answers, then start what was lost."""
        check_processes(self.fleet)  # first: a router does not start with a worker that is dead
        self.fleet.check_router()
        if time.monotonic() >= self._next:
            self.check(self.fleet.urls())
            away = [engine.url for engine in self.fleet.engines if engine.external and engine.state == "lost"]
            silent = unhealthy(away, self.timeout)
            for url in away:
                if url not in silent:
                    self.fleet.readmit(url)
            self._next = time.monotonic() + self.interval
        self.fleet.restart_lost()

    def check(self, urls: Sequence[str]) -> None:
        """Ask these engines for a token; those that do not give one are lost."""
        enough = 1 if self.fleet.tolerant else PATIENCE
        bad = unhealthy(urls, self.timeout)
        ended = check_processes(self.fleet) if bad else []  # the better reason, if it is one
        bad = {url: reason for url, reason in bad.items() if url not in ended}
        self.missed = {url: self.missed.get(url, 0) + 1 for url in bad}
        for url, reason in bad.items():
            logger.warning("engine %s missed check %d of %d: %s", url, self.missed[url], enough, reason)
            if self.missed[url] >= enough:
                self.fleet.lose(url, reason)


def check_processes(fleet: EngineFleet) -> list[str]:
    """Lose the engines whose process is gone; returns their URLs."""
    gone = {}
    for engine in fleet.engines:
        if engine.host is None or engine.state not in ("serving", "unsynced"):
            continue
        try:
            said = engine.host.describe()
        except Exception as error:
            gone[engine.url] = f"its node does not answer: {type(error).__name__}: {error}"
            continue
        if not said["alive"]:
            gone[engine.url] = f"its process {said['pid']} ended"
    for url, reason in gone.items():
        fleet.lose(url, reason)
    return list(gone)


def unhealthy(urls: Sequence[str], timeout: float) -> dict[str, str]:
    """Which of these engines make no token, and why; all are asked at the same time."""
    if not urls:
        return {}
    with ThreadPoolExecutor(len(urls), thread_name_prefix="engine-health") as pool:
        reasons = pool.map(lambda url: answers(url, timeout), urls)
    return {url: reason for url, reason in zip(urls, reasons, strict=True) if reason is not None}


def answers(url: str, timeout: float) -> str | None:
    """None when the engine makes a token within ``timeout`` seconds, else why not.

    A refused or reset connection may be a moment's trouble: it is tried once more.
    """
    reason = _token(url, timeout)
    if reason is None or reason.startswith("no token"):
        return reason
    time.sleep(AGAIN_SECONDS)
    return _token(url, timeout)


def _token(url: str, timeout: float) -> str | None:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout)
    try:
        connection.request("GET", "/health_generate")
        status = connection.getresponse().status
    except TimeoutError:
        return f"no token within {timeout:g} s (--rollout-health-check-timeout)"
    except (OSError, http.client.HTTPException) as error:
        return f"cannot be reached: {error or type(error).__name__}"
    finally:
        connection.close()
    return None if status == 200 else f"/health_generate answered {status}"
