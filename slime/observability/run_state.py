"""``state.json`` in the folder of a run: which process drives the run, what it does, and how it ended.

The driver replaces the file whenever a phase begins or ends. ``slime doctor`` reads it, also while the run goes on and
after the driver was killed.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from slime.observability.best_effort import best_effort, replacing

Status = Literal["running", "completed", "stopped", "failed", "restarting"]
FILE = "state.json"
_MOST_CHARACTERS = 20_000


@dataclass(frozen=True)
class RunState:
    """What the driver has last written about itself.

    Attributes:
        status: ``running`` until the driver ends the run itself. A driver that was killed leaves ``running``.
        pid, host: The driver's process id, and the name of its machine.
        phase: The innermost open phase, such as ``rollout`` or ``train``; empty between phases and during the start.
        since: Wall time at which this phase began, or the previous one ended, in seconds since 1970.
        error: The traceback of the error that ended the run; empty if there was none.
    """

    status: Status
    pid: int
    host: str
    phase: str
    since: float
    error: str = ""


class StateFile:
    """Writes the state of this process, the driver, to the folder of the run. A full disk does not end the run."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._state = RunState("running", os.getpid(), socket.gethostname(), "", time.time())

    def enter(self, phase: str) -> None:
        """Record the innermost open phase; an empty text if there is none."""
        self._write(replace(self._state, phase=phase, since=time.time()))

    def end(self, status: Status, error: BaseException | None = None) -> None:
        """Record how the run ended. The phase remains, since it says where an error arose."""
        text = "".join(traceback.format_exception(error)) if error is not None else ""
        self._write(replace(self._state, status=status, error=text[-_MOST_CHARACTERS:]))

    def _write(self, state: RunState) -> None:
        self._state = state
        with best_effort(FILE), replacing(self._path) as temporary:
            temporary.write_text(json.dumps(asdict(state)), encoding="utf-8")


def read_state(folder: Path) -> RunState | None:
    """Return the state in the folder of a run; None if there is none, as in runs of older releases."""
    try:
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return RunState(**values)
    except (OSError, ValueError, TypeError):
        return None
