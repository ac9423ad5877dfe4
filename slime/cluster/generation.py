"""What generation needs of the rollout manager's process: calls that can be ended before the run
goes back to a snapshot, and garbage collection that stays cheap with many samples.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator

from slime.cluster.ray_wait import wait_for
from slime.engines.background import cancel_waits

END_SECONDS = 60.0


class GenerationEnded(RuntimeError):
    """This call belongs to a part of the run that is undone."""


class Generation:
    """Knows which threads generate; each call that does so is a block ``with
    generation.call()``.
    """

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self._lock = threading.Lock()
        self._ended = False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A block that :meth:`end` can end where it waits for the event loop.

        Raises:
            GenerationEnded: Between :meth:`end` and :meth:`begin`.
        """
        thread = threading.get_ident()
        with self._lock:
            if self._ended:
                raise GenerationEnded("generation was ended to go back to a snapshot")
            self._threads.add(thread)
        try:
            yield
        finally:
            with self._lock:
                self._threads.discard(thread)

    def end(self, seconds: float = END_SECONDS) -> None:
        """End all calls in progress, and refuse further ones until :meth:`begin`.

        Raises:
            WaitExpired: A call did not end within ``seconds``, for example because user code blocks
                its thread.
        """
        with self._lock:
            self._ended = True

        def ended() -> bool:
            with self._lock:
                threads = set(self._threads)
            # Again in each round: a call may have been between two waits.
            cancel_waits(threads)
            return not threads

        wait_for("the generation in progress to end", ended, seconds)

    def begin(self) -> None:
        """Allow calls again."""
        self._ended = False


_YOUNG = 100_000
_SHARE = 0.05


class GarbageCollection:
    """Garbage collection that stays cheap with many samples in memory.

    With Python's defaults, it is expensive in two ways. A response of 1024 tokens is decoded into
    1024 small lists, and a collection every few hundred objects costs six times as much as the
    decoding. A full collection visits all samples in memory whenever their number has grown by a
    quarter, which took half of the CPU time of scheduling with thousands of groups in progress.

    Therefore young objects are only collected after as many allocations as twice the number of
    living objects. Full collections only happen in :meth:`collect`. Objects that exist when this
    one is created are never visited.
    """

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, 20, 1 << 30)
        self._took = 0.0
        self._ended = time.process_time()

    def collect(self) -> None:
        """Run a full collection, unless it would take more than a twentieth of the process's CPU
        time.
        """
        started = time.process_time()
        if self._took <= _SHARE * (started - self._ended):
            gc.collect()
            self._ended = time.process_time()
            self._took = self._ended - started
        gc.set_threshold(max(_YOUNG, 2 * len(gc.get_objects())), 20, 1 << 30)
