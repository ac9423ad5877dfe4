"""The rows of a data set in the order of an epoch, converted into prompts chunk by chunk.

The order is a pseudo-random permutation that is computed entry by entry, so that it needs no memory
however long it is. Chunks are converted in this process, or ahead of time in worker processes, with
the same result.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import wait

import numpy as np

from slime.config.seeds import derive_seed
from slime.data.prompts import Report
from slime.data.rows import RawRow, RowFile
from slime.data.sample import Sample

CHUNK = 256
CHUNK_SECONDS = 600.0
Made = tuple[list[Sample | None], Report]
Make = Callable[[list[RawRow]], Made]

_make: Make  # set in each worker process


class Chunks:
    """``chunks[i]`` is the result of ``make`` for the :data:`CHUNK` rows from position ``i *
    CHUNK`` on.

    Args:
        order: Returns the rows at a range of positions in the current order.
        workers: Number of worker processes. They are started with the first chunk, and work on the
            following chunks while one is used.
    """

    def __init__(
        self, rows: RowFile, make: Make, order: Callable[[range], list[int]], workers: int
    ) -> None:
        self._rows = rows
        self._make = make
        self._order = order
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None
        self.held: dict[int, Future[Made] | Made] = {}

    def __getitem__(self, chunk: int) -> Made:
        # Positions are read in ascending order, so earlier chunks are not needed again.
        for earlier in [known for known in self.held if known < chunk]:
            del self.held[earlier]
        last = -(-len(self._rows) // CHUNK) - 1
        # Two chunks per worker are in progress ahead of the current one, so that workers need not
        # wait for requests.
        for ahead in range(chunk, min(chunk + 2 * self._workers, last) + 1):
            if ahead not in self.held:
                self.held[ahead] = self._start(ahead)
        # A worker that hangs, in code of the tokenizer for example, must not hang the run without a
        # word.
        found = self.held[chunk]
        if isinstance(found, Future):
            if not futures.wait([found], CHUNK_SECONDS).done:
                raise TimeoutError(
                    f"{self._rows.spec}: a worker of --num-data-workers did not convert {CHUNK} "
                    f"rows to prompts in {CHUNK_SECONDS:g} s; run with --num-data-workers 0 to "
                    "see where it hangs"
                )
            found = self.held[chunk] = found.result()
        return found

    def _start(self, chunk: int) -> Future[Made] | Made:
        positions = range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(self._rows)))
        raws = self._rows.read(self._order(positions))
        if not self._workers:
            return self._make(raws)
        if self._pool is None:
            # A fork would copy locks that other threads hold.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, context, _begin, (self._make,))
        return self._pool.submit(_work, raws)

    def forget(self) -> None:
        """Drop all chunks, because the order changes."""
        self.held.clear()

    def close(self) -> None:
        """End the worker processes; a further chunk would start them again."""
        self.forget()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _begin(make: Make) -> None:
    global _make
    _make = make
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # Without this, a worker whose parent was killed would wait for work forever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(raws: list[RawRow]) -> Made:
    return _make(raws)


# --- the order of an epoch -----------------------------------------------------------------

_ROUNDS = 8
_Words = np.ndarray  # uint64


def shuffled(positions: Sequence[int] | range, count: int, seed: int) -> list[int]:
    """Return the entries at these positions of a random permutation of ``range(count)``.

    The permutation is a Feistel network over the smallest power of four, 4^k >= count. A value
    outside of the range goes through the network again until it falls inside. The network is a
    bijection, so no two positions meet in one value. Source: Black and Rogaway 2002, "Ciphers with
    Arbitrary Finite Domains", cycle-walking.

    Args:
        seed: Seed of the permutation, which depends only on it and on ``count``.
    """
    # Both halves of a value have equally many bits, so the range is the next power of four.
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [np.uint64(derive_seed(seed, "feistel", i)) for i in range(_ROUNDS)]
    values = _network(np.asarray(positions, np.uint64), half, mask, keys)
    # Fewer than three quarters of the range are outside, so a few rounds suffice.
    outside = values >= count
    while outside.any():
        values[outside] = _network(values[outside], half, mask, keys)
        outside = values >= count
    return [int(value) for value in values]


def _network(values: _Words, half: np.uint64, mask: np.uint64, keys: list[np.uint64]) -> _Words:
    left = values >> half
    right = values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + (key << np.uint64(32))) & mask)
    return (left << half) | right


def _mixed(words: _Words) -> _Words:
    """splitmix64's finalizer; multiplication wraps. Source: Steele, Lea and Flood 2014,
    doi:10.1145/2660193.2660195.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
