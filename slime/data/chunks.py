"""The rows of a data set in the order of an epoch, converted into prompts chunk by chunk.

The order is a pseudo-random permutation, which takes 8 bytes for each row. Chunks are converted in
this process, or ahead of time in worker processes, with the same result.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import numpy as np

from slime.config.process import end_with_parent
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
            # By a file: Python would wait forever for a process to read much data that ends before,
            # as one does that imports a program without `if __name__ == "__main__"`.
            self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115
            pickle.dump(self._make, self._file)
            self._file.flush()
            self._pool = ProcessPoolExecutor(self._workers, context, _begin, (self._file.name,))
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


def _begin(file: str) -> None:
    global _make
    _make = pickle.loads(Path(file).read_bytes())
    # Without this, a worker whose parent was killed would wait for work forever.
    end_with_parent(os.getppid())


def _work(raws: list[RawRow]) -> Made:
    return _make(raws)


# --- the order of an epoch -----------------------------------------------------------------


def shuffled(positions: Sequence[int] | range, count: int, seed: int) -> list[int]:
    """Return the entries at these positions of a random permutation of ``range(count)``.

    Args:
        seed: Seed of the permutation, which depends only on it and on ``count``.
    """
    rows: list[int] = _permutation(count, seed)[list(positions)].tolist()
    return rows


@functools.lru_cache(maxsize=2)
def _permutation(count: int, seed: int) -> np.ndarray:
    # RandomState, whose results numpy never changes.
    return np.random.RandomState(np.random.MT19937(seed)).permutation(count)
