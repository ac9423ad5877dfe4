"""A pool of killable verifier processes. No verifier can hang the run, exhaust its memory, or crash
it.

Each thread of the pool owns one process and starts it when it is first needed. The time limit of a
call begins when its verifier starts. A process that exceeds the limit is killed with its whole
process group and replaced, and the :class:`Verdict` of the call says so.

The pool uses threads and not asyncio for two reasons. One pool can then serve any event loop. And
the parent-death signal of a child is sent when the *thread* that started it ends, so these threads
must live as long as the process.
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
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import psutil

from slime.config.process import module_command, reduced_environment
from slime.rollout.verifier.worker import ChannelClosed, Request, receive, send
from slime.types import JsonValue

logger = logging.getLogger(__name__)

DEFAULT_MEMORY = 2 << 30
# to import a verifier or read a model on a busy machine; not counted in a call's limit
STARTUP_SECONDS = 300.0
# attempts for a call whose process ended, for example because the system was out of memory
_TRIES = 3
Setup = tuple[str, *tuple[object, ...]]
"""Import path of a function, then its arguments (JSON values)."""


class VerifierLoadError(RuntimeError):
    """A verifier cannot be imported or set up. This is an error of the configuration, not of a
    sample.
    """


class _Lost(VerifierLoadError):
    """The process ended while it loaded the verifier, so another attempt in a new process may
    succeed.
    """


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verifier call.

    Attributes:
        status: ``ok``: it returned ``value``. ``timeout``: it exceeded its time limit. ``crashed``:
            its process ended, or was stopped until the time limit, in each of three attempts.
            ``error``: it raised an exception.
        value: What the verifier returned.
        detail: What went wrong; empty for ``ok``.
    """

    status: Literal["ok", "timeout", "crashed", "error"]
    value: JsonValue = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class _Worker:
    """One verifier process and the socket to it. Only one thread uses it; :meth:`kill` may be
    called from others.
    """

    def __init__(self, memory_bytes: int, variables: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = module_command("slime.rollout.verifier.worker")
            command += [str(theirs.fileno()), str(memory_bytes), str(os.getpid())]
            # The import path of this process, so that the worker finds the same modules. "" is the
            # current folder.
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                # verifiers may print; stderr is kept, since it explains crashes
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # a process group of its own: kill() also ends the children of the verifier
                start_new_session=True,
                env={
                    **reduced_environment(os.environ, variables),
                    "PYTHONPATH": path,
                    "OMP_NUM_THREADS": "1",
                },
            )
        self.sock = ours
        self.loaded: set[str] = set()

    def call(
        self, function: str, args: tuple[object, ...], timeout: float, setup: Setup | None = None
    ) -> Verdict:
        """Run one call. The process may have ended afterwards: check :meth:`reusable`."""
        # Importing and setting up have a limit of their own, so that they do not use up that of the
        # call.
        if function not in self.loaded:
            self._load(function)
        if setup is not None and str(setup) not in self.loaded:
            self._load(setup[0], setup[1:])
            self.loaded.add(str(setup))
        try:
            deadline = time.monotonic() + timeout  # after loading, which does not count
            send(self.sock, Request(function=function, args=args), deadline)
            return Verdict(**receive(self.sock, deadline))
        except TimeoutError:
            if self.stopped:
                return Verdict(
                    "crashed",
                    detail=f"the verifier process was stopped; it ended with {self.kill()}",
                )
            self.kill()
            return Verdict("timeout", detail=f"no answer in {timeout:g} s")
        except ChannelClosed:
            return Verdict("crashed", detail=f"the verifier process ended with {self.kill()}")

    def _load(self, function: str, args: tuple[object, ...] | None = None) -> None:
        """Import ``function`` in the process. With ``args``, also call it (to load a model)."""
        deadline = time.monotonic() + STARTUP_SECONDS
        try:
            send(self.sock, Request(function=function, args=args), deadline)
            reply = receive(self.sock, deadline)
        except (TimeoutError, ChannelClosed) as error:
            lost = isinstance(error, ChannelClosed) or self.stopped
            why = (
                "its process ended or was stopped"
                if lost
                else f"it took more than {STARTUP_SECONDS:g} s"
            )
            kind = _Lost if lost else VerifierLoadError
            raise kind(
                f"loading verifier {function!r} failed: {why} (exit status {self.kill()})"
            ) from error
        if reply["status"] != "ok":
            raise VerifierLoadError(f"loading verifier {function!r} failed: {reply['detail']}")
        self.loaded.add(function)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def stopped(self) -> bool:
        """Whether a signal (SIGSTOP) froze the process, which says nothing about the verifier."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        return False

    def reusable(self, verdict: Verdict) -> bool:
        """Whether the process can run another call. After a MemoryError its state cannot be
        trusted.

        The socket of a killed process is closed, also if the process has not ended yet.
        """
        return self.alive and self.sock.fileno() >= 0 and "MemoryError" not in verdict.detail

    def kill(self) -> str:
        """Kill the whole process group, and describe how the process ended.

        It is safe to call this twice and from another thread.
        """
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.sock.close()
        try:
            code = self.process.wait(timeout=30)
        # the kernel ends it later, for example when a network file system answers
        except subprocess.TimeoutExpired:
            return "no exit within 30 s of SIGKILL"
        return f"signal {-code}" if code < 0 else f"exit code {code}"


@dataclass
class _Job:
    function: str
    args: tuple[object, ...]
    timeout: float
    future: Future[Verdict]
    setup: Setup | None = None


class VerifierPool:
    """At most ``workers`` verifier processes, which are started when they are needed.

    Args:
        workers: Maximum number of processes, and thus of calls that run at once.
        memory_bytes: Address-space limit of each process in bytes; 0 means no limit.
        variables: Names of environment variables that the processes get in addition to those that
            any program needs.
    """

    def __init__(
        self, workers: int, memory_bytes: int = DEFAULT_MEMORY, variables: Sequence[str] = ()
    ) -> None:
        self.workers = workers
        self.memory_bytes = memory_bytes
        self.variables = tuple(variables)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._live: set[_Worker] = set()
        self._open_jobs = 0
        self._closed = False

    def submit(
        self, function: str, *args: object, timeout: float, setup: Setup | None = None
    ) -> Future[Verdict]:
        """Queue ``function(*args)``.

        If the process ends during the call, the call is run again in another process, at most three
        times in total.

        Args:
            function: Import path, in any form that ``load_function`` accepts.
            args: JSON values. The result must be a JSON value, too.
            timeout: Maximum seconds from the moment at which a process starts this call.
            setup: Import path and arguments of a function that each process calls once before the
                first such call. Its time does not count.

        Returns:
            A future with the :class:`Verdict`. It raises :class:`VerifierLoadError` if the function
            cannot be imported or set up; every other outcome is a verdict.

        Raises:
            RuntimeError: The pool is closed.
        """
        future: Future[Verdict] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("this verifier pool is closed")
            # Start another thread only if all existing ones are busy, so that few calls need few
            # processes.
            self._open_jobs += 1
            if self._open_jobs > len(self._threads) and len(self._threads) < self.workers:
                thread = threading.Thread(
                    target=self._serve, name=f"verifier-{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        self._jobs.put(_Job(function, args, timeout, future, setup))
        return future

    async def run(
        self, function: str, *args: object, timeout: float, setup: Setup | None = None
    ) -> Verdict:
        """Call :meth:`submit` and await the verdict."""
        return await wrap_future(self.submit(function, *args, timeout=timeout, setup=setup))

    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        with self._lock:
            return [worker.process.pid for worker in self._live]

    def close(self) -> None:
        """Kill all workers. Running calls end with the status ``crashed``; queued calls are
        cancelled.
        """
        with self._lock:
            self._closed = True
            live = list(self._live)
            threads = list(self._threads)
        # Only the signal is sent here. The threads that own the workers close their sockets and
        # reap the processes.
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
        """Run one job, and run it again in a new process if its process was lost.

        A process that was killed or stopped from outside says nothing about the verifier, and the
        rewards of a run must not depend on such an event. Returns the worker if it can run another
        job.
        """
        outcome: Verdict | BaseException
        for _ in range(_TRIES):
            if worker is not None and not worker.alive:  # it ended while it was idle
                self._drop(worker)
                worker = None
            # The process is started with the first call, and after an outcome in doubt the next
            # call gets a new one.
            try:
                worker = worker or self._start()
                outcome = worker.call(job.function, job.args, job.timeout, job.setup)
            # it is raised in the caller; this thread must go on to serve other jobs
            except BaseException as error:
                outcome = error
            if worker is not None and (
                isinstance(outcome, BaseException) or not worker.reusable(outcome)
            ):
                self._drop(worker)
                worker = None
            # Only a lost process is worth another attempt. A timeout and an exception are verdicts.
            lost = isinstance(outcome, _Lost) or (
                isinstance(outcome, Verdict) and outcome.status == "crashed"
            )
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
        worker = _Worker(self.memory_bytes, self.variables)
        with self._lock:
            self._live.add(worker)
            closed = self._closed
        if closed:  # close() ran while the process started, so it did not see this worker
            worker.kill()
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        with self._lock:
            self._live.discard(worker)


shared_pools: dict[tuple[object, ...], VerifierPool] = {}
_shared_lock = threading.Lock()


def default_workers() -> int:
    """Half of the cores (the rollout and the engines need the others), but at least two if the
    machine has two.
    """
    cores = len(os.sched_getaffinity(0))
    return min(cores, max(2, cores // 2))


def shared_pool(
    workers: int | None = None,
    variables: Sequence[str] = (),
    memory_bytes: int = DEFAULT_MEMORY,
    of: tuple[str | None, ...] = (),
) -> VerifierPool:
    """Return the pool of this process with this size and environment, and for this purpose.

    Runs may share it, because verifiers are pure functions.
    """
    workers = workers or default_workers()
    # The process id is part of the key because a forked process has no copy of the threads of a
    # pool.
    key = (os.getpid(), workers, memory_bytes, of, *sorted(variables))
    with _shared_lock:
        if key not in shared_pools:
            shared_pools[key] = VerifierPool(workers, memory_bytes, variables)
            atexit.register(shared_pools[key].close)
        return shared_pools[key]
