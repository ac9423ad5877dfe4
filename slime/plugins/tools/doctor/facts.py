"""What is known about a run: its settings, metrics, logs and state, and the processes that are
still there; and what a rule finds in it."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from slime.cli.command import CommandError
from slime.observability.metrics import MetricsError, read_metrics
from slime.observability.run_dir import RunDir, UnreadableRun, read_settings
from slime.observability.run_state import FILE as STATE
from slime.observability.run_state import RunState, message_lines
from slime.types import JsonValue

from ..summary import end_of, no_run, read_state

if TYPE_CHECKING:
    import psutil

Row = Mapping[str, float | None]
Stacks = Callable[[Sequence[tuple[int, str]]], list[str]]
"""Returns the stacks of processes, given by id and name."""
LOG_BYTES = 200_000
"""So much of the end of each log is read."""
FILTERED = "rollout/dynamic_filter/drop_"
DUMPS = "flight_recorder_"
"""The beginning of the names of PyTorch's dumps, see :mod:`slime.plugins.tools.doctor.flight`."""


class NoRun(CommandError):
    """The folder is not that of a run."""


@dataclass(frozen=True)
class Process:
    """A living process of a run. ``stopped`` means that it was frozen by a signal (SIGSTOP) or a
    debugger.
    """

    pid: int
    name: str
    stopped: bool


_WARNING = re.compile(r"\.py:\d+: \w*Warning: ")


def _telling(text: str) -> str:
    if message := message_lines(text):
        return " … ".join(shortened(message, 2))
    lines = text.splitlines()
    return next(
        (line for line in reversed(lines) if line[:1].strip() and not _WARNING.search(line)), ""
    )


def shortened(lines: Sequence[str], most: int = 12) -> list[str]:
    """Return the lines that say something, without most of those in the middle if there are more
    than ``most``.
    """
    said = [line.strip()[:300] for line in lines if line.strip()]
    return said if len(said) <= most else [*said[: most - 1], said[-1]]


@dataclass(frozen=True)
class Facts:
    """The files of a run, as the rules read them.

    Attributes:
        steps: The rows of ``metrics.jsonl`` for training steps, oldest first.
        evaluations: The rows of evaluations.
        logs: The end of each file in ``logs``, by file name.
        processes: The driver and its descendants; None if the driver ran on another machine, or if
            it is not known. An empty list means that the driver has ended.
        now: Wall time in seconds since 1970.
        free_bytes: Free space of the file system of the run's folder.
        stacks: Looks into processes; None if that is not wanted.
        outside: Number of logs and dumps that were not read because a link leads out of the folder.
    """

    folder: Path
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    steps: Sequence[Row] = ()
    evaluations: Sequence[Row] = ()
    logs: Mapping[str, str] = field(default_factory=dict)
    state: RunState | None = None
    processes: Sequence[Process] | None = None
    now: float = 0.0
    free_bytes: int | None = None
    stacks: Stacks | None = None
    outside: int = 0

    def series(self, name: str) -> list[float]:
        """Return the values of a metric in the steps that have it."""
        return [value for row in self.steps if (value := row.get(name)) is not None]

    def steps_of(self, name: str) -> list[int]:
        """Return the numbers of the steps that have a metric, as :meth:`series` has its values."""
        return [int(row["rollout/step"] or 0) for row in self.steps if row.get(name) is not None]

    def change(self, name: str, least: int = 8) -> tuple[float, float] | None:
        """Return the medians of the first and last fifth of a metric; None if it has fewer values
        than ``least``.
        """
        values = self.series(name)
        if len(values) < least:
            return None
        count = max(len(values) // 5, 2)
        return median(values[:count]), median(values[-count:])

    def lately(self, name: str) -> float | None:
        """Return the median of the last five values of a metric; None if it has fewer than three."""
        values = self.series(name)
        return median(values[-5:]) if len(values) >= 3 else None

    def last_lines(self, part: str = "", most: int = 8) -> tuple[str, ...]:
        """Return the last telling line of each log whose name contains ``part``; of the last
        ``most`` logs.

        Warnings of Python, and the indented lines of warnings and tracebacks, tell nothing.
        """
        ends = ((name, _telling(text)) for name, text in self.logs.items() if part in name)
        return tuple(f"{name}: {line[:200]}" for name, line in ends if line)[-most:]

    def looked_into(self) -> tuple[str, ...]:
        """Return the stacks of the living processes of the run, if they are wanted."""
        if self.stacks is None:
            return ()
        return tuple(self.stacks([(one.pid, one.name) for one in self.processes or ()]))

    @property
    def samples(self) -> float:
        """The number of samples of a rollout; 0 if the settings do not say."""
        prompts = self.settings.get("rollout_batch_size")
        each = self.settings.get("n_samples_per_prompt")
        return float(prompts * each) if isinstance(prompts, int) and isinstance(each, int) else 0.0

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards decide what is trained: not in supervised fine-tuning and in distillation
        from a teacher.
        """
        return self.settings.get("loss_type") != "sft_loss" and not self.settings.get("use_opd")

    @property
    def died(self) -> bool:
        """Whether the driver has ended without saying so, for instance by ``kill -9``."""
        return self.state is not None and self.state.status == "running" and self.processes == []

    @property
    def failed(self) -> bool:
        """Whether the run ended with an error."""
        return self.state is not None and self.state.status in ("failed", "restarting")


def filtered(row: Row) -> float:
    """Return how many groups the filter has dropped in a step; prompts that are too long are not
    its doing.
    """
    names = [
        name for name in row if name.startswith(FILTERED) and name != f"{FILTERED}prompt_too_long"
    ]
    return sum(row[name] or 0.0 for name in names)


def read_facts(folder: Path, stacks: Stacks | None = None) -> Facts:
    """Read the folder of a run, but no file outside of it: a folder that somebody else made can have
    links to any file of this machine, and the report would show lines of it.

    Args:
        stacks: Looks into the processes of a run that hangs (seconds, if there are many); None if
            that is not wanted.

    Raises:
        NoRun: The folder has no ``config.yaml``; or it, ``metrics.jsonl`` or ``state.json`` is
            damaged or a link to another folder.
    """
    import shutil

    run = RunDir(folder)
    if not run.config.is_file():
        raise NoRun(no_run(folder))
    for path in (run.config, run.metrics, folder / STATE):
        if path.exists() and not is_inside(path, folder):
            raise NoRun(f"{path} leads out of the run's folder or is no file")
    try:
        settings = read_settings(run.config)
        rows = read_metrics(run.metrics) if run.metrics.is_file() else []
    except (UnreadableRun, MetricsError) as error:
        raise NoRun(str(error)) from error
    state = read_state(folder)
    # Those outside of the folder are only counted.
    logs = sorted(run.logs.glob("*.log"))
    outside = [one for one in (*logs, *run.logs.glob(f"{DUMPS}*")) if not is_inside(one, folder)]
    return Facts(
        folder,
        settings,
        [row for row in rows if "rollout/step" in row],
        [row for row in rows if "eval/step" in row],
        {path.name: end_of(path, LOG_BYTES)[0] for path in logs if path not in outside},
        state,
        processes_of(state),
        time.time(),
        shutil.disk_usage(folder).free,
        stacks,
        len(outside),
    )


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path is a regular file in ``folder`` or below it, also when links are followed."""
    try:
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a circle of links
        return False


def processes_of(state: RunState | None) -> list[Process] | None:
    """Return the driver of a run and its descendants; see :attr:`Facts.processes`."""
    import psutil

    # Process ids of another machine mean nothing here.
    if state is None or state.host != socket.gethostname():
        return None
    try:
        driver = psutil.Process(state.pid)
        # A younger process with this id is another one.
        if driver.create_time() > state.since + 1 or driver.status() == psutil.STATUS_ZOMBIE:
            return []
        return [
            _process(one) for one in (driver, *driver.children(recursive=True)) if one.is_running()
        ]
    except psutil.NoSuchProcess:
        return []
    except psutil.AccessDenied:
        return None


def _process(process: psutil.Process) -> Process:
    import psutil

    try:
        words = process.cmdline()
        name = " ".join(words)[:80] if words else process.name()
        return Process(
            process.pid,
            name,
            process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP),
        )
    except psutil.Error:
        return Process(process.pid, "?", False)


@dataclass(frozen=True)
class Finding:
    """One diagnosis.

    Attributes:
        kind: A short name, such as ``disk_full``.
        title: What is wrong, as a sentence.
        evidence: Lines of a log, or values of metrics, that show it.
        advice: What to do.
        hint: Whether nothing is broken, and the run could only be better.
    """

    kind: str
    title: str
    evidence: tuple[str, ...]
    advice: str
    hint: bool = False


Rule = Callable[[Facts], Iterator[Finding]]
