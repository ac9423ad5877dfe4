"""What the user sees while a run works: a live line per phase, a line per step, a table at the end.

On a terminal the phase under way is one live line. Elsewhere (a file, CI) each phase prints one
plain line when it is over.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, SupportsFloat

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from slime.observability.charts import sparkline
from slime.observability.evaluations import evaluation_table, figures
from slime.observability.run_dir import RunDir
from slime.observability.summary import REWARD_KEYS, Summary, print_summary, summarize, write_summary
from slime.observability.timers import Timers

if TYPE_CHECKING:
    from slime.config.args import Args

STEP_NUMBERS = (  # metric, label, format; metrics that a step lacks are not shown
    ("train/loss", "loss", "{:.2g}"),
    ("train/grad_norm", "grad", "{:.2f}"),
    ("rollout/response_len/mean", "length", "{:.1f}"),
    ("rollout/truncated_ratio", "cut", "{:.0%}"),
    ("perf/tokens_per_gpu_per_sec", "tokens/s", "{:.0f}"),
)
# These phases are always in the line of a step; others if they take LONG_SHARE of it.
STEP_PHASES = ("rollout", "train", "update_weights")
LONG_SHARE = 0.05
LABELS = {"update_weights": "sync"}


class Phase:
    """A phase that is running. It renders itself as the live line."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = time.monotonic()
        self._wall = time.time()
        self.seconds: float | None = None
        self._progress: dict[str, Any] = {}
        self._spinner = Spinner("dots", style="cyan")

    def update(self, progress: Mapping[str, Any] | None) -> None:
        """Take what :func:`slime.observability.progress.latest` says, here or in another process.

        A report from before the start of this phase belongs to another phase and is ignored.
        """
        if progress and progress.get("updated", self._wall) >= self._wall:
            self._progress = dict(progress)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started if self.seconds is None else self.seconds

    def numbers(self) -> str:
        """The numbers of the last report, such as ``reward 0.45 · 310 tokens/s``; a count of tokens becomes a rate."""
        values = dict(self._progress.get("numbers") or {})
        tokens = values.pop("tokens", None)
        since = self._progress.get("since")
        spent = (self._progress["updated"] - since) if since and "updated" in self._progress else self.elapsed
        if tokens and "tokens_per_second" not in values and spent > 0.5:
            values["tokens_per_second"] = tokens / spent
        speed = values.pop("tokens_per_second", None)
        parts = [f"{name.replace('_', ' ')} {value:.3g}" for name, value in values.items()]
        return " · ".join(parts + ([f"{speed:.0f} tokens/s"] if speed else []))

    def counts(self) -> str:
        done, total = self._progress.get("done"), self._progress.get("total")
        if self.seconds is not None and total and done != total:
            return ""  # the phase is over, but its last report has not arrived
        return f"{done}/{total}" if total else (str(done) if done else "")

    def detail(self) -> str:
        """The name of the step inside this phase that is running."""
        inner = str(self._progress.get("phase") or "")
        return "" if inner in ("", self.name) else inner

    def line(self) -> str:
        """The phase as one line of plain text."""
        label = LABELS.get(self.name, self.name).replace("_", " ")
        parts = [f"  {label:<14}{self.elapsed:7.1f} s", f"{self.counts():>9}", self.numbers()]
        return "  ".join(parts).rstrip()

    def __rich__(self) -> Table:
        row = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [
            self._spinner,
            Text(self.name.replace("_", " "), style="bold"),
            f"{self.elapsed:.0f} s",
        ]
        total = self._progress.get("total")
        if total:
            cells += [ProgressBar(total=total, completed=self._progress.get("done") or 0, width=24), self.counts()]
        if self.detail():
            cells.append(Text(self.detail(), style="dim"))
        cells.append(Text(self.numbers(), style="green"))
        row.add_row(*cells)
        return row


class Display:
    """Progress of one run in the terminal. Its phases are also its timers.

    Args:
        args: reads ``num_rollout``.
        run_dir: for the table at the end; :meth:`finish` prints none without it.
        console: where to (default: stdout).
    """

    def __init__(self, args: Args, run_dir: RunDir | None = None, console: Console | None = None) -> None:
        self.args = args
        self.run_dir = run_dir
        self.console = console or Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self.timers = Timers()
        self.rewards: list[float] = []
        self._started = time.time()
        self._open: list[tuple[Phase, Live | None]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Show and time a phase; ``perf/<name>_time`` comes out of :meth:`pop_times`. May be nested."""
        phase = Phase(name)
        live = self._live(phase)
        self._open.append((phase, live))
        try:
            with self.timers(name):
                yield phase
        finally:
            phase.seconds = phase.elapsed
            self._open.remove((phase, live))
            if live is not None:
                live.stop()
            else:
                self.note(phase.line())

    def pop_times(self) -> dict[str, float]:
        """``perf/<phase>_time`` of the phases that ended since the last call."""
        return self.timers.pop()

    def step_line(
        self, rollout_id: int, num_rollout: int | None, metrics: Mapping[str, SupportsFloat], times: Mapping[str, float]
    ) -> None:
        """Print a line per step: the reward and its curve, the loss, the step's time and how it divides into phases.

        Args:
            times: seconds by phase, from :meth:`pop_times`.
        """
        reward = next((float(metrics[key]) for key in REWARD_KEYS if metrics.get(key) is not None), None)
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
            phases = {key.removeprefix("perf/").removesuffix("_time"): seconds for key, seconds in times.items()}
            shown = {name: s for name, s in phases.items() if name in STEP_PHASES or s > LONG_SHARE * total}
            parts = " + ".join(f"{LABELS.get(name, name.replace('_', ' '))} {s:.1f}" for name, s in shown.items())
            text.append(f"  {total:.1f} s ({parts})", style="dim")
        self.note(text)

    def eval_line(self, rollout_id: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Print a line per evaluation, or a table if there are several data sets or several samples per prompt."""
        by_name = figures(metrics)
        if len(by_name) > 1 or any(key.startswith("pass@") for row in by_name.values() for key in row):
            self.note(evaluation_table(rollout_id, by_name))
            return
        text = "  ".join(f"{name} {float(row['reward']):.3f}" for name, row in by_name.items() if "reward" in row)
        self.note(Text.assemble((f"eval at {rollout_id}", "bold magenta"), f"  {text}"))

    def samples(self, lines: Sequence[str]) -> None:
        """Show a few texts (:func:`slime.observability.samples.preview`)."""
        for line in lines:
            self.note(Text(f"    {line}", style="dim", no_wrap=self.console.is_terminal, overflow="ellipsis"))

    def finish(self) -> Summary | None:
        """End the live lines, write ``summary.json`` and the picture, and print the table.

        Returns:
            The summary; None without a run folder, and for a run that made no step (``--num-rollout 0``).
        """
        self.close()
        if self.run_dir is None or not (self.run_dir.metrics.is_file() and self.run_dir.metrics.stat().st_size):
            return None
        seconds = time.time() - _process_start(self._started)
        result = summarize(self.run_dir, seconds_total=seconds)
        missing = write_summary(self.run_dir, result)
        print_summary(self.run_dir, result, self.console, hints=missing)
        return result

    def close(self) -> None:
        """Stop the live lines, also after an error; safe to call twice."""
        for _, live in reversed(self._open):
            if live is not None:
                live.stop()

    def _live(self, phase: Phase) -> Live | None:
        if not self.console.is_terminal:
            return None
        for _, outer in self._open:
            if outer is not None and outer.is_started:
                outer.stop()  # only one live line at a time, that of the innermost phase
        live = Live(phase, console=self.console, refresh_per_second=4, transient=True)
        live.start()
        return live

    def note(self, text: str | Text | Table) -> None:
        """Print a line, or a table, above the live line."""
        self.console.print(text, markup=False, highlight=False)


def _process_start(default: float) -> float:
    """Wall time at which this process began, so that imports and start-up count."""
    import psutil

    return min(psutil.Process().create_time(), default)
