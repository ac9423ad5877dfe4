"""Notice engines that ended, hang or cannot be reached."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from slime.engines.http import request_blocking

if TYPE_CHECKING:
    from slime.cluster.engine import Engine, ServerFacts
    from slime.cluster.engine_fleet import EngineFleet

logger = logging.getLogger(__name__)
POLL_SECONDS = 1.0  # between questions whether processes live, which cost nothing
RETRY_SECONDS = 1.0
MAX_MISSED = 2  # checks in a row that an engine may miss before it is replaced
MAX_MISSED_WITHOUT_TOLERANCE = 3  # the same without fault tolerance, where the run ends
RECHECK_SECONDS = 5.0  # after a miss, with fault tolerance
WAKE_SECONDS = 5.0  # between checks that failed requests cause
PAUSE_SECONDS = 5.0  # that a pause waits for checks under way; an engine that is well answers sooner
NO_TOKEN = "no token"
BUSY_SHARE = 0.1  # of a core: a process that uses less is not at work


class HealthMonitor:
    """A thread that checks all engines of a fleet.

    Whether processes live is asked every second; whether an engine makes tokens (``/health_generate``) every
    ``interval`` seconds, by threads and sockets of its own, so that a busy event loop never makes a healthy
    engine look dead. No engine is waited for before another is checked: questions that are not answered yet are
    collected later. Nothing is checked between :meth:`pause` and :meth:`resume`: engines that load weights or have
    released their memory make no tokens.

    Args:
        interval: seconds between checks.
        timeout: seconds an engine has to make a token.
        first_wait: seconds of grace after each pause.
        start_seconds: age up to which an engine that makes no token but uses the CPU is believed to compile its
            kernels, and is not lost.
    """

    def __init__(
        self, fleet: EngineFleet, interval: float, timeout: float, first_wait: float, start_seconds: float = 0.0
    ) -> None:
        self.fleet, self.interval, self.timeout, self.first_wait = fleet, interval, timeout, first_wait
        self.start_seconds = start_seconds
        self.missed: dict[str, int] = {}  # checks in a row, by URL
        self.processes = ProcessWatch(fleet)
        self._lock = threading.Lock()
        self._reasons: set[str] = set()
        self._pauses = 0  # so far: what was asked before a pause and answered after it says nothing
        self._ended = threading.Event()
        self._poll_now = threading.Event()
        self._grace = time.monotonic() + first_wait
        self._next = time.monotonic() + max(first_wait, interval)
        self._wakes_from = 0.0
        self._checker = ThreadPoolExecutor(2, thread_name_prefix="engine-check")
        self._checking: Future[None] | None = None
        self._routing: Future[None] | None = None
        self._thread = threading.Thread(target=self._work, name="engine-health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._poll_now.set()

    def wake(self) -> None:
        """Poll now, and ask every engine for a token, because a request has just failed. Returns at once."""
        now = time.monotonic()
        if now >= self._wakes_from:
            self._wakes_from = now + WAKE_SECONDS
            self._next = max(min(self._next, now), self._grace)
            self._poll_now.set()

    def pause(self, reason: str) -> None:
        """Check nothing until :meth:`resume`: no engine is lost or started again from now on.

        Returns when no engine is asked for a token, but waits no longer than :data:`PAUSE_SECONDS` for one that
        hangs.
        """
        with self._lock:
            self._reasons.add(reason)
            self._pauses += 1
            checking = self._checking
        if checking is not None:
            wait([checking], PAUSE_SECONDS)

    def resume(self, reason: str) -> None:
        with self._lock:
            self._reasons.discard(reason)
            self.missed.clear()
            self._grace = self._next = time.monotonic() + self.first_wait

    def _work(self) -> None:
        while not self._ended.is_set():
            self._poll_now.wait(POLL_SECONDS)
            self._poll_now.clear()
            try:
                if not self._reasons and not self._ended.is_set():
                    self.poll()
            except Exception:  # keep monitoring whatever one check raised
                logger.exception("the health monitor failed")

    def poll(self) -> None:
        """Check processes, then (when it is time) answers, then start what was lost."""
        pauses = self._pauses
        self._lose(self.processes.ended(POLL_SECONDS), pauses)  # first: a router takes no worker that is dead
        if self._routing is None or self._routing.done():
            self._routing = self._checker.submit(self._check_router)
        with self._lock:
            if self._pauses != pauses:
                return
            if time.monotonic() >= self._next and (self._checking is None or self._checking.done()):
                self._next = time.monotonic() + self.interval
                self._checking = self._checker.submit(self._check_all, pauses)
            self.fleet.restart_lost()

    def _check_router(self) -> None:
        try:
            self.fleet.check_router()
        except Exception:
            logger.exception("the check of the router failed")

    def _check_all(self, pauses: int) -> None:
        try:
            self.check(self.fleet.urls(), pauses)
            away = [engine.url for engine in self.fleet.engines if engine.external and engine.state == "lost"]
            silent = unhealthy(away, self.timeout)
            for url in away:
                if url not in silent:
                    self.fleet.readmit(url)
        except Exception:
            logger.exception("a health check failed")

    def check(self, urls: Sequence[str], pauses: int | None = None) -> None:
        """Ask these engines for a token; those that do not give one :data:`MAX_MISSED` times in a row are lost.

        Args:
            pauses: how many there had been when this check was begun. Its results do not count when there was
                another since.
        """
        pauses = self._pauses if pauses is None else pauses
        enough = MAX_MISSED if self.fleet.tolerant else MAX_MISSED_WITHOUT_TOLERANCE
        bad = unhealthy(urls, self.timeout)
        gone = self.processes.ended(POLL_SECONDS) if bad else {}  # the better reason, if it is one
        bad = {url: reason for url, reason in bad.items() if url not in gone}
        with ThreadPoolExecutor(max(len(bad), 1)) as pool:
            spared = list(pool.map(self._is_compiling, bad, bad.values()))
        bad = {url: reason for (url, reason), spare in zip(bad.items(), spared, strict=True) if not spare}
        with self._lock:
            if self._pauses != pauses:
                return
            self.missed = {url: self.missed.get(url, 0) + 1 for url in bad}
            for url, reason in bad.items():
                logger.warning("engine %s missed check %d of %d: %s", url, self.missed[url], enough, reason)
            if bad and self.fleet.tolerant:
                self._next = min(self._next, time.monotonic() + RECHECK_SECONDS)
            lost = {url: reason for url, reason in bad.items() if self.missed[url] >= enough}
        self._lose({**gone, **lost}, pauses)

    def _is_compiling(self, url: str, reason: str) -> bool:
        """Whether a young engine that makes no token in time uses the CPU all the same."""
        engine = next((engine for engine in self.fleet.engines if engine.url == url), None)
        if engine is None or engine.host is None or not reason.startswith(NO_TOKEN):
            return False
        if time.monotonic() - engine.ready_at > self.start_seconds:
            return False
        try:
            before = engine.host.cpu_seconds()
            time.sleep(RETRY_SECONDS)
            used = engine.host.cpu_seconds() - before
        except Exception:  # its node is gone, say: the next check of processes says so
            return False
        if used < BUSY_SHARE * RETRY_SECONDS:
            return False
        logger.warning("engine %s: %s, but it uses the CPU and is young: it is left alone", url, reason)
        return True

    def _lose(self, reasons: Mapping[str, str], pauses: int) -> None:
        with self._lock:
            lost = self.fleet.mark_lost(reasons) if self._pauses == pauses else []
        self.fleet.end(lost, wait=False)


class ProcessWatch:
    """Asks the hosts of all engines at once whether their processes live. A host that does not answer is not asked
    again before its call has ended, and delays nobody."""

    def __init__(self, fleet: EngineFleet) -> None:
        self.fleet = fleet
        self._pool = ThreadPoolExecutor(max(len(fleet.engines), 1), thread_name_prefix="engine-processes")
        self._asked: dict[str, tuple[Engine, Future[ServerFacts]]] = {}
        self._lock = threading.Lock()

    def ended(self, seconds: float) -> dict[str, str]:
        """URLs of engines whose process or node is gone, with the reason, as far as that is known after
        ``seconds``."""
        with self._lock:
            for engine in self.fleet.engines:
                host = engine.host
                if host is not None and engine.state in ("serving", "unsynced") and engine.url not in self._asked:
                    self._asked[engine.url] = engine, self._pool.submit(host.describe)
            wait([call for _, call in self._asked.values()], seconds)
            known = {url: call for url, (_, call) in self._asked.items() if call.done()}
            for url in known:
                del self._asked[url]
        gone = {}
        for url, call in known.items():
            error = call.exception()
            if error is not None:
                gone[url] = f"its node does not answer: {type(error).__name__}: {error}"
            elif not call.result()["alive"]:
                gone[url] = f"its process {call.result()['pid']} ended"
        return gone


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
    if reason is None or reason.startswith(NO_TOKEN):
        return reason
    time.sleep(RETRY_SECONDS)
    return _token(url, timeout)


def _token(url: str, timeout: float) -> str | None:
    try:
        status, _ = request_blocking("GET", f"{url}/health_generate", timeout=timeout)
    except TimeoutError:
        return f"{NO_TOKEN} within {timeout:g} s (--rollout-health-check-timeout)"
    except OSError as error:
        return f"cannot be reached: {error or type(error).__name__}"
    return None if status == 200 else f"/health_generate answered {status}"
