"""The record of the load of engines, which ``slime ui`` and the traces of rollouts show."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from slime.engines.http import request_blocking
from slime.observability.files import AppendedFile
from slime.observability.trace_file import Load

if TYPE_CHECKING:
    from slime.cluster.engine import Engine

logger = logging.getLogger(__name__)
SECONDS = 1.0
ENGINES_PER_SECOND = 32
"""A run with more engines asks less often, so that the rollout manager has little work with it."""
ANSWER_SECONDS = 2.0
MOST_KEPT = 200_000  # in memory, of all engines together; a load has some 100 bytes
FULL_LINES = 5000
"""The number of seconds in which ``engines.jsonl`` gets a line every second. After that, the time
between two lines is the age of the run divided by this number: three minutes after ten days. So the
file grows with the logarithm of the time, to about 30,000 lines."""


class EngineLoads:
    """A thread that asks each engine how many requests it runs, and keeps the answers.

    Engines are not asked while they load weights or have released their memory.

    Args:
        engines: All engines of the run.
        is_paused: Whether they must not be asked now.
        path: ``engines.jsonl``; a line has ``time`` (wall seconds) and ``engines``, a list of
            ``[index, state, running, waiting, tokens]``. The numbers are null for an engine that
            did not answer or was not asked.

    Raises:
        OSError: The file cannot be opened. Later errors are only logged.
    """

    def __init__(
        self, engines: Sequence[Engine], is_paused: Callable[[], bool], path: Path
    ) -> None:
        self.engines = engines
        self.is_paused = is_paused
        self.seconds = max(SECONDS, len(engines) / ENGINES_PER_SECOND)
        self._file = AppendedFile(path, path.name)
        self._kept: deque[Load] = deque(maxlen=MOST_KEPT)
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._written = float("-inf")
        self._pool = ThreadPoolExecutor(
            min(max(len(engines), 1), ENGINES_PER_SECOND), thread_name_prefix="engine-load"
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="engine-loads", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def between(self, start: float, end: float) -> list[Load]:
        """Return what was measured between two wall times."""
        with self._lock:
            return [load for load in self._kept if start <= load["time"] <= end]

    def _work(self) -> None:
        while not self._ended.wait(self.seconds):
            try:
                self.measure()
            except Exception:  # the run goes on without these figures
                if not self._ended.is_set():
                    logger.exception("the load of the engines could not be measured")

    def measure(self) -> None:
        """Ask all engines at the same time, and keep their answers."""
        paused = self.is_paused()
        now = time.time()
        loads = list(self._pool.map(lambda engine: load_of(engine, paused, now), self.engines))
        with self._lock:
            self._kept.extend(loads)
        age = time.monotonic() - self._started
        if age - self._written >= age / FULL_LINES:
            self._written = age
            rows = [
                [one["engine"], one["state"], one["running"], one["waiting"], one["tokens"]]
                for one in loads
            ]
            self._file.write(json.dumps({"time": round(now, 2), "engines": rows}))


def load_of(engine: Engine, paused: bool, now: float) -> Load:
    """Ask an engine for its load; ``now`` is the wall time, in seconds, of what is returned."""
    load = Load(
        time=now, engine=engine.index, state=engine.state, running=None, waiting=None, tokens=None
    )
    if engine.state not in ("serving", "unsynced"):
        return load
    if paused:
        return {**load, "state": "paused"}
    try:
        status, body = request_blocking("GET", f"{engine.url}/v1/loads", timeout=ANSWER_SECONDS)
        ranks = json.loads(body)["loads"] if status == 200 else []
        running, waiting, tokens = (
            sum(int(rank.get(field) or 0) for rank in ranks)
            for field in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {**load, "state": "silent"}
    return {**load, "running": running, "waiting": waiting, "tokens": tokens}
