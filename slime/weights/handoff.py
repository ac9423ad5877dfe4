"""Pass buckets from the thread that gathers weights to the event loop that sends them.

Gathering is a collective operation, so it must happen on the trainer's thread and in the same order on every rank.
While one bucket is being sent, the next is gathered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from slime.engines.payload import Bucket


class Handoff:
    """An iterable of buckets that holds one bucket at a time. Both sides wait with a deadline.

    The gathering side calls :meth:`put` for each bucket and then :meth:`close`. The sending side iterates, on any
    thread. :meth:`put` returns after the bucket was taken, so at most one bucket is gathered while one is sent.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._changed = threading.Condition()
        self._item: Bucket | None = None
        self._closed = False
        self._abandoned = False
        self._error: BaseException | None = None

    def put(self, bucket: Bucket) -> bool:
        """Pass one bucket. Return False if the sending side has given up: nothing more will be sent, but gathering must
        still be completed on all ranks."""
        with self._changed:
            if self._abandoned:
                return False
            self._item = bucket
            self._changed.notify_all()
            self._wait(
                lambda: self._item is None or self._abandoned, f"bucket {bucket.index} to be taken by the sender"
            )
            self._item = None
            return not self._abandoned

    def close(self, error: BaseException | None = None) -> None:
        """End the iteration after the last bucket, with ``error`` by raising it in the sending side."""
        with self._changed:
            self._closed, self._error = True, error
            self._changed.notify_all()

    def abandon(self) -> None:
        """End the waits of both sides, because the sending side has given up or is done."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Bucket]:
        while True:
            with self._changed:
                done = lambda: self._item is not None or self._closed or self._abandoned  # noqa: E731
                self._wait(done, "the trainer to gather the next bucket")
                if self._item is None:
                    if self._error is not None:
                        raise self._error
                    return
                bucket, self._item = self._item, None
                self._changed.notify_all()
            yield bucket

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(done, self._deadline):
            raise TimeoutError(f"gave up after waiting {self._deadline:.0f} s for {what}")
