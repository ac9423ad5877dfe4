"""Ctrl-C and SIGTERM: the first one asks for a graceful shutdown, the second one ends the run at
once.

In a program of the user's, only Ctrl-C is taken, and only during a phase: it ends the phase, and
the second one interrupts the program.

A driver with ``--max-restarts`` has a supervisor as its parent process
(:mod:`slime.plugins.restarts.supervisor`), which forwards the signals that it receives, and to which
the driver reports over a pipe how far it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from signal import _HANDLER as Handler

PIPE_VARIABLE = "SLIME_SUPERVISOR_PIPE"
SETTINGS_VARIABLE = "SLIME_SUPERVISOR_SETTINGS"
FORWARDED = {signal.SIGINT: signal.SIGRTMIN + 1, signal.SIGTERM: signal.SIGRTMIN + 2}
"""Signals by which the supervisor forwards those that it receives. They differ from the originals
because Ctrl-C reaches the whole process group, and therefore the driver directly as well: the
driver must be able to tell a second Ctrl-C from the forwarded copy of the first."""


class Reports:
    """The driver's end of the pipe. Every method is a no-op in a process without a supervisor."""

    def __init__(self) -> None:
        self._pipe: int | None = None
        self.settings: dict[str, object] = {}
        """Arguments of a restarted driver, which replace its own; empty in the first
        driver.
        """

    def attach(self) -> bool:
        """Take over the pipe that the environment names; returns whether there is one.

        The variables are removed and the pipe is closed in child processes, so that none of them
        takes itself for the driver.
        """
        pipe = os.environ.pop(PIPE_VARIABLE, None)
        self.settings |= json.loads(os.environ.pop(SETTINGS_VARIABLE, "{}"))
        if pipe is not None:
            self._pipe = int(pipe)
            os.set_inheritable(self._pipe, False)
        return self.attached

    @property
    def attached(self) -> bool:
        return self._pipe is not None

    def tell(self, **facts: object) -> None:
        """Report facts:

        - ``began``: the run has begun, with the arguments that decide how it is restarted; from
          now on, an end without ``over`` is a loss.
        - ``saved``: a snapshot of this run was committed.
        - ``lost``: a part of the run was lost; the driver must be run again, however this process
          ends.
        - ``over``: the run ends, successfully or not, and must not be run again.
        - ``in_shutdown``: whether the processes of the run are being ended; ``complete``: whether
          all of its work is done.
        """
        if self._pipe is not None:
            # The supervisor was killed; this process is killed with its parent.
            with contextlib.suppress(OSError):
                os.write(self._pipe, json.dumps(facts).encode() + b"\n")


REPORTS = Reports()

_MEANT = {number: int(meant) for meant, number in FORWARDED.items()}


class StopRequested(Exception):
    """Ctrl-C or SIGTERM was received: the run saves a snapshot and shuts down."""


class StopSignals:
    """Turns the first SIGINT or SIGTERM into a request that every wait checks; the second ends the
    process at once.

    One signal may arrive twice: directly, since Ctrl-C reaches the whole process group, and
    forwarded by the supervisor. The two ways are therefore counted separately, and the larger count
    decides.

    Args:
        in_program: Whether the run belongs to a program of the user's (:mod:`slime.api`), which
            must survive the signals. Then SIGTERM is left alone, and the second SIGINT raises
            KeyboardInterrupt.
    """

    def __init__(self, in_program: bool = False) -> None:
        self.in_program = in_program
        self.requested: str | None = None
        # whether a request interrupts no wait: in a block of deferred(), and during the shutdown
        self.is_deferred = False
        self._previous: dict[int, Handler] = {}
        self._received: Counter[bool] = Counter()  # keyed by whether the supervisor forwarded it

    def __enter__(self) -> StopSignals:
        self.install()
        return self

    def install(self) -> None:
        """Install the handlers; called again after ``ray.init``, whose C++ code installs its
        own.
        """
        if threading.current_thread() is threading.main_thread():
            forwarded = FORWARDED.values() if REPORTS.attached else ()
            numbers = (
                (signal.SIGINT,) if self.in_program else (signal.SIGINT, signal.SIGTERM, *forwarded)
            )
            for number in numbers:
                previous = signal.signal(number, self._on_signal)
                # Only the first call sees the handlers from before the run; later ones see our own.
                self._previous.setdefault(number, previous)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def forget(self) -> None:
        """Take back a request that was obeyed, so that the run can go on."""
        self.requested = None
        self._received.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Only notes the request: the signal may have interrupted any line, so it is raised by the
        # waits (check).
        meant = _MEANT.get(number, number)
        self._received[meant != number] += 1
        if max(self._received.values()) > 1:
            if self.in_program:
                raise KeyboardInterrupt("interrupted twice")
            end_at_once(128 + meant)
        if self.requested is None:
            self.requested = signal.Signals(meant).name
            # else the user hears nothing for minutes, and presses again
            if self.is_deferred and not self.in_program:
                words = "the run stops when its step is trained or saved (press again to kill)"
                with contextlib.suppress(OSError):  # print could be what the signal has interrupted
                    os.write(2, f"{self.requested}: {words}\n".encode())

    def check(self) -> None:
        """Raise :class:`StopRequested` if a signal was received."""
        if self.requested is not None and not self.is_deferred:
            raise StopRequested(self.requested)

    def deferred(self) -> AbstractContextManager[None]:
        """A block whose waits a signal does not interrupt; it interrupts the first wait after the
        block.
        """
        return self._block(True)

    def interruptible(self) -> AbstractContextManager[None]:
        """A block whose waits a signal interrupts, also inside of :meth:`deferred`."""
        return self._block(False)

    @contextlib.contextmanager
    def _block(self, is_deferred: bool) -> Iterator[None]:
        before = self.is_deferred
        self.is_deferred = is_deferred
        try:
            yield
        finally:
            self.is_deferred = before


def end_at_once(code: int) -> None:
    """Kill all child processes and exit without saving."""
    import psutil

    # First, or the supervisor would take this end for a loss and restart the run.
    REPORTS.tell(over=True)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(code)
