"""The part of a snapshot that is written while training goes on (``--async-save``)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class BackgroundSave:
    """Tensors were copied; ``written`` is done when this rank's files are there, ``finalize`` is a collective.

    Errors of the writer are raised by :meth:`finish`.
    """

    def __init__(self, written: Future[Any], finalize: Callable[[], None] = lambda: None) -> None:
        self.written, self.finalize = written, finalize

    def done(self) -> bool:
        return self.written.done()

    def finish(self, seconds: float) -> None:
        """Wait for this rank's files, then complete the snapshot with all ranks.

        Raises:
            TimeoutError: they were not there in time.
        """
        try:
            self.written.result(seconds)
        except TimeoutError as error:
            raise TimeoutError(f"a snapshot was not written within {seconds:g} s (--phase-timeout)") from error
        self.finalize()
