"""What a run records about itself in its folder.

``state.json``: which process drives the run, what it does, and how it ended. The driver replaces
the file whenever a phase begins or ends, and every few seconds while it waits for other processes.
``slime doctor`` and ``slime ui`` read it, also while the run goes on and after the driver was
killed.

For ``slime replay``, ``attempts.jsonl`` has a line for each time that the run was started or
resumed: the settings of this attempt, and the values that are known only after the start, such as
the length of the run and the number of threads. ``weights.jsonl`` has a line with a digest of the
weights for each update of the engines.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from slime.config.settings import redacted_text
from slime.observability.files import best_effort, replacing
from slime.observability.progress import Progress
from slime.observability.run_dir import RunDir, read_settings
from slime.types import JsonObject

Status = Literal["running", "completed", "stopped", "failed", "restarting"]
FILE = "state.json"
_MOST_CHARACTERS = 20_000
_MOST_SAID = 16
_HEAD = re.compile(r"[A-Za-z_][\w.]*(:|$)")
_FRAME = re.compile(r'\s+File "[^"]+", line \d+')
_NO_WAIT: Mapping[str, Any] = {"waiting": "", "waiting_since": 0.0, "deadline": 0.0, "said": {}}
WAIT_SECONDS = 2.0
"""A wait is recorded when it has lasted so long, and again after each such time."""


@dataclass(frozen=True)
class RunState:
    """What the driver has last written about itself.

    Attributes:
        status: ``running`` until the driver ends the run itself. A driver that was killed leaves
            ``running``.
        pid, host: The driver's process id, and the name of its machine.
        phase: The innermost open phase, such as ``rollout`` or ``train``; empty between phases and
            during the start.
        since: Wall time at which this phase began, or the previous one ended, in seconds since
            1970.
        error: The traceback of the error that ended the run; empty if there was none.
        waiting: What the driver waits for, if it has waited for some seconds; empty otherwise.
            After an error, what it had waited for.
        waiting_since: Wall time at which this wait began.
        deadline: Seconds after which this wait ends with an error.
        said: What the processes that it waits for last said, by name.
    """

    status: Status
    pid: int
    host: str
    phase: str
    since: float
    error: str = ""
    waiting: str = ""
    waiting_since: float = 0.0
    deadline: float = 0.0
    said: Mapping[str, Progress] = field(default_factory=dict)


class StateFile:
    """Writes the state of this process, the driver, to the folder of the run. A full disk does not
    end the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._state = RunState("running", os.getpid(), socket.gethostname(), "", time.time())
        self._wrote_wait = 0.0
        self._lock = threading.Lock()  # an asynchronous run has a second thread that waits

    def enter(self, phase: str) -> None:
        """Record the innermost open phase; an empty text if there is none."""
        self.write(phase=phase, since=time.time(), **_NO_WAIT)

    def wait(self, what: str, since: float, deadline: float, said: Mapping[str, Progress]) -> None:
        """Record a wait that goes on, at most every :data:`WAIT_SECONDS`.

        Args:
            since: Wall time at which it began.
            deadline: Seconds that it may take.
            said: What the processes last said, by name; that of the first few is kept.
        """
        now = time.time()
        # The driver polls several times a second, and the file may be on a network disk.
        if now - max(self._wrote_wait, since) >= WAIT_SECONDS:
            self._wrote_wait = now
            shown = {name: _without_nan(said[name]) for name in sorted(said)[:_MOST_SAID]}
            self.write(waiting=what, waiting_since=since, deadline=deadline, said=shown)

    def wait_over(self) -> None:
        """Record that the driver got what it waited for."""
        if self._state.waiting:
            self.write(**_NO_WAIT)

    def end(self, status: Status, error: BaseException | None = None) -> None:
        """Record how the run ended. The phase remains, since it says where an error arose."""
        text = (
            redacted_text("".join(traceback.format_exception(error))) if error is not None else ""
        )
        self.write(status=status, error=text[-_MOST_CHARACTERS:])

    def write(self, **changes: Any) -> None:
        with self._lock:
            # The end is written once; nothing may replace it.
            if self._state.status != "running" and "status" not in changes:
                return  # a thread still waited when the run ended
            self._state = replace(self._state, **changes)
            with best_effort(FILE), replacing(self._path) as temporary:
                temporary.write_text(json.dumps(asdict(self._state)), encoding="utf-8")


def message_lines(text: str) -> list[str]:
    """Return the whole message of the last error in a traceback, also of another process; empty if
    there is none.

    It begins with the class of the error and may have several lines.
    """
    lines = text.rstrip().splitlines()
    # A message may itself contain a traceback, of another process, so the place of a line decides
    # and not only its form.
    heads = [i for i, line in enumerate(lines) if i and _HEAD.match(line) and _ends_frame(lines, i)]
    # The first of the last traceback: later lines that look like one belong to the message.
    return [line.rstrip() for line in lines[heads[-1] :]] if heads else []


def _ends_frame(lines: Sequence[str], i: int) -> bool:
    """Whether the line before is the end of a frame: its place, its code, or the marks below the
    code.
    """
    return lines[i - 1].startswith("  ") and any(
        _FRAME.match(line) for line in lines[max(i - 3, 0) : i]
    )


def _without_nan(said: Progress) -> Progress:
    """Leave out numbers that JSON does not have, such as the mean of rewards of which one is
    NaN.
    """
    if "numbers" not in said:
        return said
    return {
        **said,
        "numbers": {name: value for name, value in said["numbers"].items() if math.isfinite(value)},
    }


# --- for slime replay ----------------------------------------------------------------------


@dataclass(frozen=True)
class Settled:
    """Values of a run that its flags do not determine alone.

    Attributes:
        asynchronous: Whether the loop of train_async.py ran.
        on_gpu: Whether the training ranks had GPUs.
        threads: CPU threads of each training rank.
        max_tokens: The token budget of micro-batches, also if it was measured
            (``--max-tokens-per-gpu``).
        forward_tokens: The budget of passes without a backward
            (``--log-probs-max-tokens-per-gpu``).
        first_rollout: The first rollout that this process trained.
        loaded: The snapshot from which it began, or whose weights it took; None for
            ``--hf-checkpoint``.
        working_directory: What relative paths of the settings refer to.
    """

    asynchronous: bool
    on_gpu: bool
    num_rollout: int
    threads: int
    max_tokens: int | None
    forward_tokens: int | None
    first_rollout: int
    loaded: str | None
    working_directory: str


@dataclass(frozen=True)
class SentWeights:
    """The weights of one update of the engines.

    Attributes:
        version: ``attempt.step``, where ``step`` is the number of rollouts that have trained the
            weights.
        digest: See :func:`digest_of_digests`.
        dtype: The dtype of floating-point tensors on the engines; None if the tensors were not
            cast.
        tensors: The number of tensors. An update may leave out frozen ones.
    """

    version: str
    digest: str
    dtype: str | None
    tensors: int

    @property
    def step(self) -> int:
        return int(self.version.rpartition(".")[2])


def digest_of_digests(digests: Mapping[str, str]) -> str:
    """Return one XXH3-128 (hex) for the digests of many tensors by name, in the order of the
    names.
    """
    lines = (f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def append_attempt(run: RunDir, settled: Settled) -> None:
    """Record what this attempt has settled, together with the settings that are in ``config.yaml``
    now.

    A run that is resumed with other flags replaces ``config.yaml``; the line keeps the settings of
    the earlier steps.
    """
    with best_effort(run.attempts.name):
        # What is in the file, and not the arguments: it has no secrets.
        settings = read_settings(run.config)
        # Only this user may read it, as with config.yaml.
        _append(run.attempts, {"settled": asdict(settled), "settings": settings}, 0o600)


def _append(path: Path, values: JsonObject, mode: int = 0o666) -> None:
    """Append a line of JSON, which is a line of its own also if a full disk has cut the one
    before.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode), "r+b") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        # The last byte tells whether the line before is complete.
        cut = file.read() not in (b"", b"\n")
        file.write(b"\n" * cut + json.dumps(values).encode() + b"\n")


def append_weights(run: RunDir, sent: SentWeights) -> None:
    with best_effort(run.weights.name):
        _append(run.weights, asdict(sent))
