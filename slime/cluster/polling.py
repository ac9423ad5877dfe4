"""Waiting by polling; every wait has a name, a deadline and a report."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Report = Callable[[], str]
T = TypeVar("T")


class WaitExpired(TimeoutError):
    """A wait exceeded its deadline; the message says who waited for what, how long, and which processes are alive."""


def wait_for(
    what: str,
    done: Callable[[], T],
    deadline: float,
    *,
    poll: float = 0.1,
    report: Report | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call ``done`` until it returns a true value, and return that value.

    Args:
        what: Names the wait in the error, e.g. ``"engine 0 (pid 123) to become healthy"``.
        done: Called every ``poll`` seconds; an exception that it raises ends the wait and propagates.
        deadline: Seconds from now.
        report: Returns a text to add to the error, such as living processes or last log lines.

    Raises:
        WaitExpired: ``done`` returned no true value within ``deadline`` seconds.
    """
    start = clock()
    while True:
        result = done()
        if result:
            return result
        waited = clock() - start
        if waited >= deadline:
            detail = f"\n{report()}" if report else ""
            raise WaitExpired(f"waited {waited:.0f} s (deadline {deadline:.0f} s) for {what}{detail}")
        sleep(min(poll, max(deadline - waited, 0.0)))
