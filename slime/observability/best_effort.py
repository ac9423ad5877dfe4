"""What is written for people to look at never ends a run: a full disk costs files, not the training."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator

logger = logging.getLogger(__name__)
_failures: Counter[str] = Counter()


@contextlib.contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Log an ``OSError`` of what stands inside, the 1st, 2nd, 4th, 8th, ... time, and go on after it.

    Args:
        what: is named in the log, such as "the texts of samples".
    """
    try:
        yield
    except OSError as error:
        _failures[what] += 1
        count = _failures[what]
        if count & (count - 1) == 0:
            logger.warning("%s could not be written, %d time(s) so far; the run goes on: %s", what, count, error)
