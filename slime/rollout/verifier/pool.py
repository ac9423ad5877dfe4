"""A pool of killable verifier processes: no verifier can hang a run, eat its memory or take it down.

Each thread of the pool owns one process, started when first needed. A call has a time limit counted
from when its verifier starts; a process over the limit is killed with its whole process group and
replaced, and the call's :class:`Verdict` says so. Threads and not asyncio, so that one pool serves
any event loop, and so that the parent-death signal (bound to the *thread* that started the child)
comes when the process ends and not before.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from asyncio import wrap_future
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from slime.rollout.verifier.channel import ChannelClosed, Request, receive, send
from slime.types import JsonValue

logger = logging.getLogger(__name__)

DEFAULT_MEMORY = 2 << 30
STARTUP_SECONDS = 300.0  # imports of a verifier or reading of a model on a busy machine; not in a call's limit
_TRIES = 3  # of a call whose process ends, by the system's lack of memory for instance
Setup = tuple[str, *tuple[object, ...]]
"""Import path of a function, then its arguments (JSON values)."""


class VerifierLoadError(RuntimeError):
    """A verifier cannot be imported: a fault of the set-up, not of a sample."""


class _Lost(VerifierLoadError):
    """The process ended while it loaded; a new one may do better."""


@dataclass(frozen=True)
class Verdict:
    """What became of one verifier call.

    ``timeout``: over its time limit. ``crashed``: its process ended, in each of three tries. ``error``: it raised.
    """

    status: Literal["ok", "timeout", "crashed", "error"]
    value: JsonValue = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class _Worker:
    """One verifier process and the socket to it. Used by one thread."""

    def __init__(self, memory_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "slime.rollout.verifier.worker"]
            command += [str(theirs.fileno()), str(memory_bytes), str(os.getpid())]
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # verifiers print; stderr stays, it is where a crash explains itself
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        self.sock = ours
        self.loaded: set[str] = set()

    def call(self, function: str, args: tuple[object, ...], timeout: float, setup: Setup | None = None) -> Verdict:
        """Run one call. Afterwards the process may be dead: see :attr:`alive`."""
        if function not in self.loaded:
            self._load(function)
        if setup is not None and str(setup) not in self.loaded:
            self._load(setup[0], setup[1:])
            self.loaded.add(str(setup))
        try:
            deadline = time.monotonic() + timeout
            send(self.sock, Request(function=function, args=args), deadline)
            return Verdict(**receive(self.sock, deadline))
        except TimeoutError:
            self.kill()
            return Verdict("timeout", detail=f"no answer in {timeout:g} s")
        except ChannelClosed:
            return Verdict("crashed", detail=f"the verifier process ended with {self.kill()}")

    def _load(self, function: str, args: tuple[object, ...] | None = None) -> None:
        """Import ``function``; with ``args`` call it as well (a model that is read)."""
        deadline = time.monotonic() + STARTUP_SECONDS
        request = Request(function=function, load_only=True) if args is None else Request(function=function, args=args)
        try:
            send(self.sock, request, deadline)
            reply = receive(self.sock, deadline)
        except (TimeoutError, ChannelClosed) as error:
            lost = isinstance(error, ChannelClosed)
            why = "its process ended" if lost else f"took over {STARTUP_SECONDS:g} s"
            kind = _Lost if lost else VerifierLoadError
            raise kind(f"loading verifier {function!r} failed: {why} (exit status {self.kill()})") from error
        if reply["status"] != "ok":
            raise VerifierLoadError(f"loading verifier {function!r} failed: {reply['detail']}")
        self.loaded.add(function)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def reusable(self, verdict: Verdict) -> bool:
        """Whether it may run the next call; after a MemoryError its heap is not to be trusted."""
        return self.alive and "MemoryError" not in verdict.detail

    def kill(self) -> str:
        """End the whole process group; say how the process ended. Safe to call twice and from another thread."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.sock.close()
        code = self.process.wait(timeout=30)
        return f"signal {-code}" if code < 0 else f"exit code {code}"


@dataclass
class _Job:
    function: str
    args: tuple[object, ...]
    timeout: float
    future: Future[Verdict]
    setup: Setup | None = None


class VerifierPool:
    """At most ``workers`` verifier processes, started lazily.

    Args:
        workers: processes, and calls that run at once.
        memory_bytes: address-space limit of each process; 0 means none.
    """

    def __init__(self, workers: int, memory_bytes: int = DEFAULT_MEMORY) -> None:
        if workers < 1:
            raise ValueError(f"a verifier pool needs at least one worker, not {workers}")
        self.workers = workers
        self.memory_bytes = memory_bytes
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._live: set[_Worker] = set()
        self._open_jobs = 0
        self._closed = False

    def submit(self, function: str, *args: object, timeout: float, setup: Setup | None = None) -> Future[Verdict]:
        """Queue ``function(*args)``.

        Args:
            function: import path, any form that ``load_function`` reads.
            args: JSON values; the result must be one as well.
            timeout: seconds, from when a process starts on this call.
            setup: function and arguments of what a process does once before its first such call, not
                counted into ``timeout``.

        A call whose process ends is run again in another process, three times in all. The future raises
        :class:`VerifierLoadError` when the function cannot be imported or set up; every other outcome is a
        :class:`Verdict`.
        """
        future: Future[Verdict] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("this verifier pool is closed")
            self._open_jobs += 1
            if self._open_jobs > len(self._threads) and len(self._threads) < self.workers:
                thread = threading.Thread(target=self._serve, name=f"verifier-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put(_Job(function, args, timeout, future, setup))
        return future

    async def run(self, function: str, *args: object, timeout: float, setup: Setup | None = None) -> Verdict:
        """:meth:`submit`, awaited."""
        return await wrap_future(self.submit(function, *args, timeout=timeout, setup=setup))

    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        with self._lock:
            return [worker.process.pid for worker in self._live]

    def close(self) -> None:
        """Kill all workers. Calls under way end as crashed, queued ones are cancelled."""
        with self._lock:
            self._closed = True
            live, threads = list(self._live), list(self._threads)
        for worker in live:
            if worker.alive:
                with suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
        for _ in threads:
            self._jobs.put(None)

    def _serve(self) -> None:
        worker: _Worker | None = None
        while (job := self._jobs.get()) is not None:
            if self._closed or not job.future.set_running_or_notify_cancel():
                job.future.cancel()
            else:
                worker = self._run(worker, job)
            with self._lock:
                self._open_jobs -= 1
        if worker is not None:
            self._drop(worker)

    def _run(self, worker: _Worker | None, job: _Job) -> _Worker | None:
        """Run one job, again in a new process where its process was lost: killed from outside, it says nothing about
        the verifier, and the numbers of a run must not depend on it."""
        outcome: Verdict | BaseException
        for _ in range(_TRIES):
            if worker is not None and not worker.alive:  # it was lost while it had nothing to do
                self._drop(worker)
                worker = None
            try:
                worker = worker or self._start()
                outcome = worker.call(job.function, job.args, job.timeout, job.setup)
            except BaseException as error:  # whatever it is belongs to the caller, never to this thread
                outcome = error
            if worker is not None and (isinstance(outcome, BaseException) or not worker.reusable(outcome)):
                self._drop(worker)
                worker = None
            lost = isinstance(outcome, _Lost) or (isinstance(outcome, Verdict) and outcome.status == "crashed")
            if self._closed or not lost:
                break
            detail = outcome.detail if isinstance(outcome, Verdict) else outcome
            logger.warning("verifier %s: %s", job.function, detail)
        if isinstance(outcome, Verdict):
            job.future.set_result(outcome)
        elif self._closed:
            job.future.set_result(Verdict("crashed", detail="the verifier pool was closed"))
        else:
            job.future.set_exception(outcome)
        return worker

    def _start(self) -> _Worker:
        worker = _Worker(self.memory_bytes)
        with self._lock:
            self._live.add(worker)
            closed = self._closed
        if closed:
            worker.kill()
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        with self._lock:
            self._live.discard(worker)


_shared: dict[tuple[int, int, int], VerifierPool] = {}
_shared_lock = threading.Lock()


def default_workers() -> int:
    """Half of the cores, the other half being the rollout's and the engines', and at least two where there are two."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, max(2, cores // 2))


def shared_pool(workers: int | None = None, memory_bytes: int = DEFAULT_MEMORY) -> VerifierPool:
    """The process's pool of this size. Verifiers are pure functions, so runs may share one."""
    workers = workers or default_workers()
    key = (os.getpid(), workers, memory_bytes)
    with _shared_lock:
        if key not in _shared:
            _shared[key] = VerifierPool(workers, memory_bytes)
            atexit.register(_shared[key].close)
        return _shared[key]
