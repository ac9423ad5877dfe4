"""Health checks: detect engines that ended, hang or cannot be reached."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from slime.cluster.engine import ServerFacts, at_once
from slime.engines.http import request_blocking

if TYPE_CHECKING:
    from slime.cluster.engine_fleet import EngineFleet

logger = logging.getLogger(__name__)
POLL_SECONDS = 1.0  # between checks whether processes live, which cost next to nothing
RETRY_SECONDS = 1.0
MAX_MISSED = 2  # missed checks in a row after which an engine is replaced
MAX_MISSED_WITHOUT_TOLERANCE = 3  # the same without fault tolerance, when it ends the run
RECHECK_SECONDS = 5.0  # until the next check after a miss, with fault tolerance
WAKE_SECONDS = 5.0  # minimum between checks caused by failed requests
SEND_SECONDS = 0.2  # from the start of a check until its requests have arrived at the engines
NO_TOKEN = "no token"
BUSY_SHARE = 0.1  # of one core; a process that uses less is considered idle


class HealthMonitor:
    """A thread that checks all engines of a fleet.

    It checks every second whether the processes live, and every ``check_interval`` seconds whether
    each engine generates a token (``/health_generate``). The latter uses separate threads and sockets,
    so that a busy event loop never makes a healthy engine look dead. All engines are checked at the
    same time, and late answers are collected in a later round. Nothing is checked between
    :meth:`pause` and :meth:`resume`, because engines generate no tokens while they load weights or
    after they have released their memory.

    An engine that generates no token but uses the CPU is assumed to compile kernels, and does not
    count as lost, up to the age of ``start_seconds``.
    """

    def __init__(self, fleet: EngineFleet) -> None:
        self.fleet = fleet
        self.settings = fleet.settings
        self.missed: dict[str, int] = {}  # by URL: how many checks in a row were missed
        self.processes = ProcessWatch(fleet)
        self._lock = threading.Lock()
        # the reasons of pauses that have not ended; they may overlap
        self._paused_for: set[str] = set()
        # The number of pauses so far. A check that was started before a pause and ended after it
        # proves nothing, so it is dropped if this number has changed.
        self._pauses = 0
        self._ended = threading.Event()
        self._poll_now = threading.Event()
        self._grace_ends = 0.0
        self.next_check = time.monotonic() + self.settings.check_interval
        self.wakes_from = 0.0
        self._checker = ThreadPoolExecutor(2, thread_name_prefix="engine-check")
        self.checking: Future[None] | None = None
        self._check_began = 0.0
        self._routing: Future[None] | None = None
        self._thread = threading.Thread(target=self._work, name="engine-health", daemon=True)

    def start(self) -> None:
        """Begin, when the engines have started."""
        self.next_check = time.monotonic() + self.settings.check_interval
        self.resume("start")
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._poll_now.set()

    def wake(self) -> None:
        """Poll now and ask every engine for a token, because a request has just failed. Returns at
        once.
        """
        # When an engine dies, many requests fail at the same time: the first one is enough. The
        # check respects the grace period after a pause.
        now = time.monotonic()
        if now >= self.wakes_from:
            self.wakes_from = now + WAKE_SECONDS
            self.next_check = max(min(self.next_check, now), self._grace_ends)
            self._poll_now.set()

    def pause(self, reason: str) -> None:
        """Check nothing until :meth:`resume`: from now on, no engine is declared lost or restarted.

        The result of a running check is dropped, so it is not waited for: SGLang answers after a
        second or more. Only its requests must have arrived: an engine waits for those that it has
        before it releases its memory, and SGLang crashes if another one arrives meanwhile.
        """
        with self._lock:
            self._paused_for.add(reason)
            self._pauses += 1
            checking = self.checking
            sent = self._check_began + SEND_SECONDS - time.monotonic()
        if checking is not None and sent > 0:
            wait([checking], sent)

    @property
    def paused(self) -> bool:
        return bool(self._paused_for)

    def resume(self, reason: str) -> None:
        with self._lock:
            self._paused_for.discard(reason)
            self.missed.clear()
            self._grace_ends = time.monotonic() + self.settings.first_wait
            # A pause in every step must not cause a check in every step.
            self.next_check = max(self.next_check, self._grace_ends)

    def _work(self) -> None:
        while not self._ended.is_set():
            self._poll_now.wait(POLL_SECONDS)
            self._poll_now.clear()
            if not self._paused_for and not self._ended.is_set():
                _survived(self.poll)

    def poll(self) -> None:
        """Check the processes, then (if it is time) whether engines generate tokens, then restart
        lost engines.
        """
        pauses = self._pauses
        # first, because no router starts with a dead worker
        self._lose(self.processes.ended(POLL_SECONDS), pauses)
        if self._routing is None or self._routing.done():
            self._routing = self._checker.submit(_survived, self.fleet.check_router)
        # Under the lock, so that no pause can begin between this test and the start of a check or
        # an engine.
        with self._lock:
            if self._pauses != pauses:
                return
            if time.monotonic() >= self.next_check and (
                self.checking is None or self.checking.done()
            ):
                self._check_began = time.monotonic()
                self.next_check = self._check_began + self.settings.check_interval
                self.checking = self._checker.submit(_survived, self._check_all, pauses)
            self.fleet.restart_lost()

    def _check_all(self, pauses: int) -> None:
        self.check(self.fleet.urls(), pauses)
        # This run cannot restart external engines, but somebody else may have done so.
        away = [
            engine.url
            for engine in self.fleet.engines
            if engine.external and engine.state == "lost"
        ]
        silent = unhealthy(away, self.settings.check_timeout)
        self.fleet.readmit([url for url in away if url not in silent])

    def check(self, urls: Sequence[str], pauses: int | None = None) -> None:
        """Ask these engines for a token; one that generates none :data:`MAX_MISSED` times in a row
        is lost.

        Args:
            pauses: The number of pauses when this check was started. If there was another one
                since, the results do not count.
        """
        pauses = self._pauses if pauses is None else pauses
        tolerant = self.settings.tolerant
        enough = MAX_MISSED if tolerant else MAX_MISSED_WITHOUT_TOLERANCE
        bad = unhealthy(urls, self.settings.check_timeout)
        # An ended process is the better reason.
        gone = self.processes.ended(POLL_SECONDS) if bad else {}
        bad = {url: reason for url, reason in bad.items() if url not in gone}
        spared = at_once(lambda url: self._is_compiling(url, bad[url]), list(bad))
        bad = {url: bad[url] for url, spare in zip(bad, spared, strict=True) if not spare}
        with self._lock:
            if self._pauses != pauses:
                return
            self.missed = {url: self.missed.get(url, 0) + 1 for url in bad}
            for url, reason in bad.items():
                logger.warning(
                    f"engine {url} missed check {self.missed[url]} of {enough}: {reason}"
                )
            # One missed check may be an accident. Check again soon, so that a dead engine is not
            # noticed much later.
            if bad and tolerant:
                self.next_check = min(self.next_check, time.monotonic() + RECHECK_SECONDS)
            lost = {url: reason for url, reason in bad.items() if self.missed[url] >= enough}
        self._lose({**gone, **lost}, pauses)

    def _is_compiling(self, url: str, reason: str) -> bool:
        """Whether an engine that has missed a check was started recently and is using the CPU."""
        engine = next((engine for engine in self.fleet.engines if engine.url == url), None)
        if engine is None or engine.external or not reason.startswith(NO_TOKEN):
            return False
        if time.monotonic() - engine.ready_at > self.settings.start_seconds:
            return False
        try:
            before = engine.cpu_seconds()
            time.sleep(RETRY_SECONDS)
            used = engine.cpu_seconds() - before
        # For example, its node is gone: the next check of processes notices that.
        except Exception:
            return False
        if used < BUSY_SHARE * RETRY_SECONDS:
            return False
        logger.warning(
            f"engine {url}: {reason}, but it was started recently and uses the CPU: it is not lost"
        )
        return True

    def _lose(self, reasons: Mapping[str, str], pauses: int) -> None:
        with self._lock:
            lost = self.fleet.mark_lost(reasons) if self._pauses == pauses else []
        # Outside the lock and without waiting: a node that does not answer must not delay pause()
        # or other checks.
        self.fleet.end(lost, wait=False)


def _survived(check: Callable[..., None], *arguments: object) -> None:
    """Call a part of the health checks, which go on whatever it raises: otherwise no further loss
    would be noticed.
    """
    try:
        check(*arguments)
    except Exception:
        logger.exception("a health check failed")


class ProcessWatch:
    """Asks the hosts of all engines at the same time whether their server processes live.

    A host that does not answer delays no other, and is not asked again before that call has ended.
    """

    def __init__(self, fleet: EngineFleet) -> None:
        self.fleet = fleet
        self._pool = ThreadPoolExecutor(
            max(len(fleet.engines), 1), thread_name_prefix="engine-processes"
        )
        self._asked: dict[str, Future[ServerFacts]] = {}  # by URL
        self._lock = threading.Lock()

    def ended(self, seconds: float) -> dict[str, str]:
        """URLs of the engines whose process or node is gone, with the reason, as far as known after
        ``seconds``.
        """
        asked = self._asked
        with self._lock:
            for engine in self.fleet.engines:
                alive = engine.state in ("serving", "unsynced")
                if alive and not engine.external and engine.url not in asked:
                    asked[engine.url] = self._pool.submit(engine.describe)
            wait(asked.values(), seconds)
            known = {url: call for url, call in asked.items() if call.done()}
            for url in known:
                del asked[url]
        gone = {}
        for url, call in known.items():
            error = call.exception()
            if error is not None:
                gone[url] = f"its node does not answer: {type(error).__name__}: {error}"
            elif not call.result()["alive"]:
                gone[url] = f"its process {call.result()['pid']} ended{call.result()['fate']}"
        return gone


def unhealthy(urls: Sequence[str], timeout: float) -> dict[str, str]:
    """The engines that generate no token, with the reason; all are asked at the same time."""
    reasons = at_once(lambda url: (url, answers(url, timeout)), urls)
    return {url: reason for url, reason in reasons if reason is not None}


def answers(url: str, timeout: float) -> str | None:
    """None if the engine generates a token within ``timeout`` seconds, otherwise the reason why
    not.

    A refused or reset connection may be a temporary problem, so the request is tried once more.
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
