"""Controls when Python's cyclic garbage collector runs in the process that holds the samples."""

from __future__ import annotations

import gc
import time

_YOUNG = 100_000
_SHARE = 0.05


class GarbageCollection:
    """Garbage collection that stays cheap with many samples in memory.

    With Python's defaults, it is expensive in two ways. A response of 1024 tokens is decoded into 1024 small lists, and
    a collection every few hundred objects costs six times as much as the decoding. A full collection visits all samples
    in memory whenever their number has grown by a quarter, which took half of the CPU time of scheduling with thousands
    of groups in progress.

    Therefore young objects are only collected after as many allocations as twice the number of living objects. Full
    collections only happen in :meth:`collect`. Objects that exist when this one is created are never visited.
    """

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, 20, 1 << 30)
        self._took = 0.0
        self._ended = time.process_time()

    def collect(self) -> None:
        """Run a full collection, unless it would take more than a twentieth of the process's CPU time."""
        started = time.process_time()
        if self._took <= _SHARE * (started - self._ended):
            gc.collect()
            self._ended = time.process_time()
            self._took = self._ended - started
        gc.set_threshold(max(_YOUNG, 2 * len(gc.get_objects())), 20, 1 << 30)
