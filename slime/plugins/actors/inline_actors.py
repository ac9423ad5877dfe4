"""Actors that are objects and threads of this process; see :mod:`slime.cluster.actors`.

A whole run is then one process: a debugger stops at every line, an exception of a user's function
is its own, and nothing is imported twice. Results and stored objects are handed over as they are,
without copies.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import gc
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import Any, TypeVar, cast

from slime.cluster.actors import (
    OWN_THREADS,
    ActorHandle,
    ActorLost,
    ActorProcess,
    Actors,
    NoAnswer,
    Place,
    Ref,
)
from slime.config.args import Args
from slime.models.cpu_memory import set_compute_variables
from slime.observability.progress import DEBUGGER

T = TypeVar("T")
HOST = "127.0.0.1"


class InlineRef(Future[Any]):
    """The result of a call, or a stored object."""

    def future(self) -> Future[Any]:
        return self


class _Threads:
    """Daemon threads that do calls in the order of their arrival. They start when they are
    needed.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._calls: queue.SimpleQueue[tuple[InlineRef, Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._count = self._open = 0

    def submit(self, call: Callable[[], object]) -> InlineRef:
        ref = InlineRef()
        with self._lock:
            self._open += 1
            if self._open > self._count < self._most:
                self._count += 1
                threading.Thread(
                    target=self._work, name=f"{self._name}-{self._count}", daemon=True
                ).start()
        self._calls.put((ref, call))
        return ref

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            ref, call = item
            try:
                result = call()
            except BaseException as error:
                self._done()
                ref.set_exception(error)
            else:
                self._done()
                ref.set_result(result)
            del item, ref, call

    def _done(self) -> None:
        with self._lock:
            self._open -= 1

    def end(self) -> None:
        """End the threads when they have done what they have."""
        for _ in range(self._count):
            self._calls.put(None)


class InlineActor:
    """The handle of an actor."""

    def __init__(
        self, cls: type, arguments: Sequence[object], threads: int, own_threads: bool
    ) -> None:
        self._lost: str | None = None
        self._main = _Threads(cls.__name__, threads)
        names = OWN_THREADS if own_threads else ()
        self._aside = {
            name: _Threads(f"{cls.__name__}-{name}", 1) for name in names if hasattr(cls, name)
        }
        self._object = self._main.submit(lambda: cls(*arguments))

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Method(self, name)

    def call(
        self, name: str, arguments: tuple[object, ...], keywords: dict[str, object]
    ) -> InlineRef:
        def do() -> object:
            if self._lost is not None:
                raise ActorLost(self._lost)
            return getattr(self._object.result(), name)(*arguments, **keywords)

        return self._aside.get(name, self._main).submit(do)

    def end(self, why: str) -> None:
        self._lost = why
        for threads in (self._main, *self._aside.values()):
            threads.end()


class _Method:
    def __init__(self, actor: InlineActor, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *arguments: object, **keywords: object) -> InlineRef:
        return self._actor.call(self._name, arguments, keywords)


class InlineBundles:
    """Places in this process, which are always there."""

    def wait(self, seconds: float) -> bool:
        return True

    def places(self, count: int, seconds: float) -> list[Place]:
        return [Place((127, 0, 0, 1), index, index, HOST) for index in range(count)]

    def options(self, index: int, gpus: float, cpus: float) -> Mapping[str, Any]:
        return {}

    def remove(self) -> None:
        pass


class InlineActors(Actors):
    """All actors of a run are in this process."""

    def __init__(self) -> None:
        self._actors: list[InlineActor] = []
        self._process: _ProcessState | None = None

    # --- the process ---------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._process is not None

    def connect(self) -> None:
        # What an earlier run has freed goes back to the system. glibc would keep it, in pieces: six
        # runs of a model with 135M parameters took 12 GB instead of 6.
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)
        self._process = _ProcessState()
        set_compute_variables()

    def disconnect(self) -> None:
        process = self._process
        if process is None:
            return
        self._process = None
        for actor in self._actors:
            actor.end("the run has ended")
        self._actors.clear()
        process.restore()

    def resources(self) -> Mapping[str, float]:
        return {"CPU": float(os.cpu_count() or 1), "GPU": float(len(self.own_gpus()))}

    def report(self) -> str:
        return "inline: one process"

    def nodes(self) -> int:
        return 1

    def node(self) -> str:
        return HOST

    def address(self) -> str:
        return HOST

    def own_gpus(self) -> Sequence[int]:
        import torch

        return [0] if torch.cuda.is_available() else []

    def log_to(self, folder: Path, name: str) -> None:
        """Add the log lines of this process to ``inline.log``. What functions print goes to the
        terminal.
        """
        assert self._process is not None
        self._process.log_to(folder / "inline.log")

    def reserve(self, bundle: Mapping[str, float], count: int, spread: bool) -> InlineBundles:
        return InlineBundles()

    # --- actors and their results --------------------------------------------------------------

    def create(
        self,
        cls: type,
        *arguments: object,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        threads: int | None = None,
        own_threads: bool = False,
        spread: bool = False,
    ) -> ActorHandle:
        os.environ.update(environment or {})
        # Each actor has arguments of its own, as in a process of its own: users' functions may set
        # values in them.
        own = [
            copy.copy(argument) if isinstance(argument, Args) else argument
            for argument in arguments
        ]
        actor = InlineActor(cls, own, threads or 1, own_threads)
        self._actors.append(actor)
        return actor

    def kill(self, actor: ActorHandle) -> None:
        cast(InlineActor, actor).end("it was ended")

    def end_processes(self, processes: Sequence[ActorProcess], seconds: float) -> None:
        pass

    def put(self, value: T) -> Ref[T]:
        ref = InlineRef()
        ref.set_result(value)
        return ref

    def get(self, refs: Sequence[Ref[T]], timeout: float | None = None) -> list[T]:
        futures = [ref.future() for ref in refs]
        wait(futures, timeout, FIRST_EXCEPTION)
        for future in futures:
            if future.done() and (error := future.exception()) is not None:
                raise error  # its traceback ends in the line of the user's function
        if not all(future.done() for future in futures):
            raise NoAnswer(f"no result within {timeout} s")
        return [future.result() for future in futures]

    def wait(self, refs: Sequence[Ref[T]], timeout: float) -> tuple[list[Ref[T]], list[Ref[T]]]:
        wait([ref.future() for ref in refs], timeout)
        done = [ref for ref in refs if ref.future().done()]
        return done, [ref for ref in refs if ref not in done]

    async def result(self, ref: Ref[T]) -> T:
        result: T = await asyncio.wrap_future(ref.future())
        return result


class _ProcessState:
    """What a run changes of its process, to be put back at its end: the program may go on, and
    start another run.
    """

    _lock = threading.Lock()

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._switch_interval = sys.getswitchinterval()
        self._collection = gc.get_threshold()
        self._breakpoints = DEBUGGER.breakpoints()
        self._log: logging.Handler | None = None
        self._level = logging.getLogger().level
        # Threads that wait for the interpreter's lock: the model thread of the engine needs it
        # after each operator.
        sys.setswitchinterval(0.001)
        self._breakpoints.__enter__()

    def log_to(self, file: Path) -> None:
        with self._lock:  # several actors start at once, and each line is written once
            if self._log is not None:
                return
            file.parent.mkdir(parents=True, exist_ok=True)
            self._log = logging.FileHandler(file, encoding="utf-8")
        self._log.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(self._log)
        logging.getLogger().setLevel(min(self._level, logging.INFO))

    def restore(self) -> None:
        _leave_process_group()
        os.environ.clear()
        os.environ.update(self._environment)
        sys.setswitchinterval(self._switch_interval)
        gc.set_threshold(*self._collection)
        gc.unfreeze()
        self._breakpoints.__exit__(None, None, None)
        if self._log is not None:
            logging.getLogger().removeHandler(self._log)
            logging.getLogger().setLevel(self._level)
            self._log.close()
        gc.collect()


def _leave_process_group() -> None:
    """End the process group of the only rank, so that another run of this process can have one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
