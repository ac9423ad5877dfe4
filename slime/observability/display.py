"""The terminal output of a run: a live line per phase, a line per step, and a table at the end.

On a terminal, the running phase is shown as one live line. Otherwise (a file, CI), each phase
prints one plain line when it ends.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, SupportsFloat, TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from slime.observability.files import AppendedFile, best_effort
from slime.observability.metrics import REWARD_KEYS, evaluation_table, figures
from slime.observability.progress import DEBUGGER, Timers
from slime.observability.run_dir import RunDir
from slime.observability.run_state import StateFile
from slime.registry import find

STEP_NUMBERS = (  # metric, label, format; metrics that a step does not have are not shown
    ("train/preference_accuracy", "accuracy", "{:.0%}"),
    ("train/preference_margin", "margin", "{:.2f}"),
    ("train/chosen_reward", "chosen", "{:.2f}"),
    ("train/rejected_reward", "rejected", "{:.2f}"),
    ("train/loss", "loss", "{:.3g}"),
    ("train/grad_norm", "grad", "{:.2f}"),
    ("rollout/response_len/mean", "length", "{:.1f}"),
    ("rollout/truncated_ratio", "cut", "{:.0%}"),
    ("perf/tokens_per_gpu_per_sec", "tokens/s", "{:.0f}"),
)
# The line of a step always shows these phases, and others only if they take more than LONG_SHARE of
# the step's time.
STEP_PHASES = ("rollout", "train", "update_weights")
LONG_SHARE = 0.05
LABELS = {"update_weights": "sync"}
_BLOCKS = "▁▂▃▄▅▆▇█"


class Phase:
    """A phase, which rich renders as the live line while it runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = time.monotonic()
        self._wall = time.time()
        self.seconds: float | None = None
        self._progress: dict[str, Any] = {}
        self._spinner = Spinner("dots", style="cyan")

    def update(self, progress: Mapping[str, Any] | None) -> None:
        """Store the result of :func:`slime.observability.progress.latest`, of this or another
        process.

        A report from before the start of this phase belongs to another phase and is ignored.
        """
        if progress and progress.get("updated", self._wall) >= self._wall:
            self._progress = dict(progress)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started if self.seconds is None else self.seconds

    def numbers(self) -> str:
        """Return the numbers of the last report as text, such as ``reward 0.45 · 310 tokens/s``. A
        count of tokens is converted to a rate."""
        # A count of tokens says little, so it is shown as a rate over the time in which they were
        # counted.
        values = dict(self._progress.get("numbers") or {})
        tokens = values.pop("tokens", None)
        since = self._progress.get("since")
        spent = (
            (self._progress["updated"] - since)
            if since and "updated" in self._progress
            else self.elapsed
        )
        if tokens and "tokens_per_second" not in values and spent > 0.5:
            values["tokens_per_second"] = tokens / spent
        speed = values.pop("tokens_per_second", None)
        parts = [f"{name.replace('_', ' ')} {value:.3g}" for name, value in values.items()]
        return " · ".join(parts + ([f"{speed:.0f} tokens/s"] if speed else []))

    def counts(self) -> str:
        done = self._progress.get("done")
        total = self._progress.get("total")
        if self.seconds is not None and total and done != total:
            return ""  # the phase is over, but its last report has not arrived
        return f"{done}/{total}" if total else (str(done) if done else "")

    def detail(self) -> str:
        """Return the name of the running step inside this phase."""
        inner = str(self._progress.get("phase") or "")
        return "" if inner in ("", self.name) else inner

    def line(self) -> str:
        """Return the phase as one line of plain text."""
        # Columns of fixed width, so that the lines of a log can be compared.
        label = LABELS.get(self.name, self.name).replace("_", " ")
        parts = [f"  {label:<14}{self.elapsed:7.1f} s", f"{self.counts():>9}", self.numbers()]
        return "  ".join(parts).rstrip()

    def __rich__(self) -> Table:
        # rich renders this again several times a second, always with the current numbers.
        row = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [
            self._spinner,
            Text(self.name.replace("_", " "), style="bold"),
            f"{self.elapsed:.0f} s",
        ]
        total = self._progress.get("total")
        if total:
            cells += [
                ProgressBar(total=total, completed=self._progress.get("done") or 0, width=24),
                self.counts(),
            ]
        if self.detail():
            cells.append(Text(self.detail(), style="dim"))
        cells.append(Text(self.numbers(), style="green"))
        row.add_row(*cells)
        return row


class Display:
    """Shows the progress of one run in the terminal, and measures the time of its phases.

    Args:
        run_dir: Folder of the run, from which :meth:`finish` makes the table at the end; without it
            there is no table, no ``state.json`` and no ``logs/driver.log``.
        console: Output of the lines. Default: stdout.
        since: Wall time at which the run began. Default: the start of this process.
    """

    def __init__(
        self,
        run_dir: RunDir | None = None,
        console: Console | None = None,
        since: float | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.state = StateFile(run_dir.path) if run_dir is not None else None
        self._log: AppendedFile | None = None
        self.console = console or _stdout()
        self.timers = Timers()
        self.rewards: list[float] = []
        self._started = time.time()
        self._since = since
        self._open: list[tuple[Phase, Live | None]] = []
        DEBUGGER.before[:] = [self.close]  # the terminal has one display

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Show a phase and measure its time, which :meth:`pop_times` returns as
        ``perf/<name>_time``. Phases can be nested."""
        phase = Phase(name)
        live = self._live(phase)
        self._open.append((phase, live))
        self._record_phase()
        try:
            with self.timers(name):
                yield phase
        finally:
            # Also after an error: the live line must not stay open over the traceback.
            phase.seconds = phase.elapsed
            self._open.remove((phase, live))
            if live is not None:
                live.stop()
            else:
                self.note(phase.line())
        # Not after an error: the state then names the phase in which it arose.
        self._record_phase()

    def _record_phase(self) -> None:
        if self.state is not None:
            self.state.enter(self._open[-1][0].name if self._open else "")

    def pop_times(self) -> dict[str, float]:
        """Return ``perf/<phase>_time`` of the phases that ended since the last call, in seconds."""
        return self.timers.pop()

    def step_line(
        self,
        rollout_id: int,
        num_rollout: int | None,
        metrics: Mapping[str, SupportsFloat],
        times: Mapping[str, float],
    ) -> None:
        """Print the line of a step: the reward and its curve, the loss, and the time of the step
        and its phases.

        Args:
            times: Seconds by phase, from :meth:`pop_times`.
        """
        reward = next(
            (float(metrics[key]) for key in REWARD_KEYS if metrics.get(key) is not None), None
        )
        # The parts from left to right: reward with its curve, other numbers, time.
        text = Text.assemble((f"step {rollout_id + 1}/{num_rollout or '?'}", "bold"))
        if reward is not None:
            self.rewards.append(reward)
            text.append(f"  reward {reward:.3f} ")
            text.append(sparkline(self.rewards), style="cyan")
        for key, label, form in STEP_NUMBERS:
            if metrics.get(key) is not None:
                text.append(f"  {label} {form.format(float(metrics[key]))}")
        if times:
            total = float(metrics.get("perf/step_time") or sum(times.values()))
            phases = {
                key.removeprefix("perf/").removesuffix("_time"): seconds
                for key, seconds in times.items()
            }
            # Short phases would make the line long and say nothing.
            parts = " + ".join(
                f"{LABELS.get(name, name.replace('_', ' '))} {s:.1f}"
                for name, s in phases.items()
                if name in STEP_PHASES or s > LONG_SHARE * total
            )
            text.append(f"  {total:.1f} s ({parts})", style="dim")
        self.note(text)

    def eval_line(self, rollout_id: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Print the line of an evaluation, or a table if there are several data sets or several
        samples per prompt.
        """
        # One number fits into a line; more of them are easier to compare in a table.
        by_name = figures(metrics)
        if len(by_name) > 1 or any(
            key.startswith("pass@") for row in by_name.values() for key in row
        ):
            self.note(evaluation_table(rollout_id, by_name))
            return
        text = "  ".join(
            f"{name} {float(row['reward']):.3f}" for name, row in by_name.items() if "reward" in row
        )
        self.note(Text.assemble((f"eval at {rollout_id}", "bold magenta"), f"  {text}"))

    def samples(self, lines: Sequence[str]) -> None:
        """Print the lines of :func:`slime.observability.samples.preview`."""
        for line in lines:
            self.note(
                Text(
                    f"    {line}",
                    style="dim",
                    no_wrap=self.console.is_terminal,
                    overflow="ellipsis",
                )
            )

    def finish(self) -> None:
        """End the live lines, write ``summary.json`` and the reward curve, and print the table.

        Without a run folder, or if the run had no step (``--num-rollout 0``), there is no summary.
        """
        self.close()
        if self.run_dir is None or not (
            self.run_dir.metrics.is_file() and self.run_dir.metrics.stat().st_size
        ):
            return
        # The user has waited for imports and the start as well.
        since = _process_start(self._started) if self._since is None else self._since
        find("summary", "finish")(self.run_dir, self.console, time.time() - since, since)

    def close(self) -> None:
        """Stop the live lines, also after an error. It is safe to call this twice."""
        for _, live in reversed(self._open):
            if live is not None:
                live.stop()

    def _live(self, phase: Phase) -> Live | None:
        if not self.console.is_terminal:
            return None
        for _, outer in self._open:
            if outer is not None and outer.is_started:
                outer.stop()  # a console can show only one live line: that of the innermost phase
        live = Live(phase, console=self.console, refresh_per_second=4, transient=True)
        live.start()
        return live

    def note(self, text: str | Text | Table) -> None:
        """Print a line or a table above the live line. Lines are also written to
        ``logs/driver.log``.
        """
        self.console.print(text, markup=False, highlight=False)
        if not isinstance(text, Table):
            self.record(str(text))

    def record(self, line: str) -> None:
        """Write a line, or several, only to ``logs/driver.log``."""
        if self.run_dir is None:
            return
        with best_effort("driver.log"):
            # Opened with the first line, since a display without a run writes none.
            if self._log is None:
                self.run_dir.logs.mkdir(parents=True, exist_ok=True)
                self._log = AppendedFile(self.run_dir.logs / "driver.log", "driver.log")
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """Draw the last ``width`` finite values as one line of block characters, on a scale of 0 to 1,
    or a larger one.
    """
    recent = [value for value in values if math.isfinite(value)][-width:]
    if not recent:
        return ""
    low = min(0.0, *recent)
    height = max(1.0, *recent) - low
    return "".join(_BLOCKS[round((value - low) / height * 7)] for value in recent)


class _LastingOutput:
    """An output whose writes never fail; what cannot be written is lost, but ``logs/driver.log``
    has the lines.

    Ctrl-C also ends the ``tee`` of ``train.py | tee FILE``, and the run still has to save its
    snapshot. The disk of a redirected output may be full. Characters that the encoding of the
    output lacks are shown as question marks.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        # A terminal of an old encoding must not end a run by a character of a model.
        encoding = self._stream.encoding or "utf-8"
        with self._tolerant():
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._tolerant():
            self._stream.flush()

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What is still buffered would be written again at the exit of this process, and change
            # its exit code.
            with suppress(OSError, ValueError):
                number = self._stream.fileno()
                nowhere = os.open(os.devnull, os.O_WRONLY)
                before = os.dup(number)
                os.dup2(nowhere, number)
                self._stream.flush()
                if not isinstance(error, BrokenPipeError):  # a full disk may have room again
                    os.dup2(before, number)
                os.close(before)
                os.close(nowhere)


def _stdout() -> Console:
    """Standard output. A notebook gets plain lines: rich would show each as an output of its own,
    and a notebook's standard output calls itself a terminal but cannot move the cursor up, as live
    lines do."""
    terminal = False if Console().is_jupyter else None
    # None: it was closed
    file = cast(TextIO, _LastingOutput(sys.stdout)) if sys.stdout is not None else None
    return Console(
        file=file, soft_wrap=True, highlight=False, force_jupyter=False, force_terminal=terminal
    )


def _process_start(default: float) -> float:
    """Return the wall time at which this process started, so that the total time includes imports
    and start-up.
    """
    import psutil

    return min(psutil.Process().create_time(), default)
