"""Energy that a GPU takes for each step of a run, from NVML's counter
(``nvmlDeviceGetTotalEnergyConsumption``, in mJ since the driver was loaded; Volta and newer).

A thread looks twice in a second at how many steps the run's own file of metrics has, and reads the
counter when there is one more. So a step's energy is that from the end of the step before it,
within half a second of its power. Works alike for any trainer that writes a line for each step.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
from collections.abc import Callable
from typing import Any

INTERVAL_SECONDS = 0.5


def counter(gpu: int) -> Callable[[], float] | None:
    """A function that reads the joules of one GPU, by its number on the machine; None without
    NVML.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # no package, no driver, no such GPU, or a card without the counter
        return None
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000.0


class StepEnergy:
    """Use it as a context around the run.

    Args:
        steps: How many steps have ended.
        read: Joules so far, as :func:`counter` gives it; with None nothing is measured.
    """

    def __init__(self, steps: Callable[[], int], read: Callable[[], float] | None) -> None:
        self.steps, self.read = steps, read
        self.joules: list[float] = []
        """At the end of each step, in order."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> StepEnergy:
        if self.read is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self.read is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL_SECONDS):
            with contextlib.suppress(OSError, ValueError):  # the file is being made or written
                self.look()

    def look(self) -> None:
        """Note the counter for the steps that have ended since the last look."""
        assert self.read is not None, "nothing is measured"
        new = self.steps() - len(self.joules)
        if new > 0:
            self.joules += [self.read()] * new

    def kilojoules(self, warmup: int) -> dict[str, Any]:
        """Of each step after the first ``warmup`` (at least one), and their median; empty if there
        is none.
        """
        ends = self.joules[max(warmup, 1) - 1 :]
        steps = [round((b - a) / 1000.0, 2) for a, b in itertools.pairwise(ends)]
        return {"steps": steps, "median": round(statistics.median(steps), 2)} if steps else {}
