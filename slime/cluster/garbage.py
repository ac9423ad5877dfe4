"""When Python's collector of cyclic garbage looks at what."""

from __future__ import annotations

import gc
import time

_YOUNG = 100_000
_SHARE = 0.05


class GarbageCollection:
    """Of the process that holds the samples: quick where it makes answers, seldom over all that lives.

    An answer of 1024 tokens is 1024 small lists: looking for cycles every few hundred costs six times as much as
    decoding them. And by itself Python goes over all samples under way each time their number has grown by a quarter,
    which was half of the CPU time of scheduling with thousands of groups under way. So young objects are looked at when
    as many were made as twice those that live, and all by :meth:`collect`; those of now never.
    """

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, 20, 1 << 30)
        self._took = 0.0
        self._ended = time.process_time()

    def collect(self) -> None:
        """Go over all objects, unless that would be more than a twentieth of the process's CPU time."""
        started = time.process_time()
        if self._took <= _SHARE * (started - self._ended):
            gc.collect()
            self._ended = time.process_time()
            self._took = self._ended - started
        gc.set_threshold(max(_YOUNG, 2 * len(gc.get_objects())), 20, 1 << 30)
