"""The summary of a run, which is read from its folder: the table at the end, ``summary.json`` and
the reward curve.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NotRequired, TypedDict

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from slime.observability.files import best_effort, parse_json, regular, replacing, shown
from slime.observability.metrics import REWARD_KEYS, MetricsError, Row, figures, read_metrics
from slime.observability.run_dir import RunDir, UnreadableRun, read_settings
from slime.types import JsonObject

from . import PHASES
from .charts import bar_chart, reward_curve_png


class Series(TypedDict):
    """The values of one evaluation data set, and the number of rollouts that were trained before
    each.
    """

    steps: list[float]
    values: list[float]


class Summary(TypedDict):
    """The figures of a run. ``accuracy_*`` are the first and the last value of the first evaluation
    data set. ``rollouts_done`` are the numbers of rollouts that were trained with each reward;
    those of older releases have none.
    """

    run: str
    seed: int | None
    num_rollouts: int
    accuracy_before: float | None
    accuracy_after: float | None
    reward_per_rollout: list[float]
    rollouts_done: NotRequired[list[float]]
    seconds_total: float
    seconds_per_phase: dict[str, float]
    eval: dict[str, Series]


def summarize(run_dir: RunDir, seconds_total: float | None = None, since: float = 0.0) -> Summary:
    """Read the figures of a run from ``metrics.jsonl`` and ``config.yaml``.

    Args:
        run_dir: The folder of the run.
        seconds_total: Wall time since ``since``, to which the steps before it are added: those of
            the attempts that a run continues. Default: the value in ``summary.json`` or the time of
            all steps, whichever is larger, or else the time between the first and the last row.
        since: Wall time at which the last attempt began.

    Raises:
        MetricsError: There is no ``metrics.jsonl``, it has no rows, or it or ``config.yaml`` is
            damaged.
    """
    if not run_dir.metrics.is_file():
        raise MetricsError(f"{run_dir.path} is not the folder of a run: it has no metrics.jsonl")
    rows = read_metrics(run_dir.metrics)
    if not rows:
        raise MetricsError(f"{run_dir.metrics} has no rows: the run stopped before its first step")
    evals = _evaluations(rows)
    first = next(iter(evals.values()), None)
    rewarded = [(row, reward) for row in rows if (reward := _reward(row)) is not None]
    rewards = [reward for _, reward in rewarded]
    config = _config(run_dir)
    seed = config.get("rollout_seed", config.get("seed"))
    if seconds_total is not None:
        total = seconds_total + _stepping(row for row in rows if (row.get("time") or 0.0) < since)
    else:  # the file of a run that was resumed and killed is that of an earlier attempt
        total = max(_total_on_disk(run_dir) or 0.0, _stepping(rows))
    total = total or (rows[-1].get("time") or 0.0) - (rows[0].get("time") or 0.0)
    return {
        "run": run_dir.path.name,
        "seed": seed if isinstance(seed, int) else None,
        "num_rollouts": sum("rollout/step" in row for row in rows),
        "accuracy_before": first["values"][0] if first else None,
        "accuracy_after": first["values"][-1] if first else None,
        "reward_per_rollout": rewards,
        "rollouts_done": [(row.get("rollout/step") or 0) + 1 for row, _ in rewarded],
        "seconds_total": round(total, 2),
        "seconds_per_phase": _phases(rows, total),
        "eval": evals,
    }


def finish(run_dir: RunDir, console: Console, seconds_total: float, since: float) -> None:
    """At the end of a run, write ``summary.json`` and the reward curve, and print the table."""
    from ..replay.certificate import certify

    summary = summarize(run_dir, seconds_total, since)
    missing = write_summary(run_dir, summary)
    print_summary(run_dir, summary, console, hints=missing)
    certify(run_dir)


def write_summary(run_dir: RunDir, summary: Summary) -> list[str]:
    """Write ``summary.json`` and the reward curve; return notes for the user about missing parts.

    If a file cannot be written, this is only logged, because the run itself has succeeded.
    """
    with best_effort("summary.json"), replacing(run_dir.summary) as temporary:
        temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if not (summary["reward_per_rollout"] or summary["eval"]):
        return []  # a run on answers of a data set has nothing to draw
    try:
        with best_effort("the reward curve"):
            reward_curve_png(run_dir.reward_curve, summary)
    except ModuleNotFoundError as error:
        return [
            f"the reward curve was not drawn: {error.name} is not installed (pip install "
            "'slime-rl[plots]')"
        ]
    return []


def print_summary(
    run_dir: RunDir, summary: Summary, console: Console, hints: list[str] | None = None
) -> None:
    """Print the table at the end of a run: evaluations, reward curve, time per phase, and where to
    find the files.
    """
    parts: list[RenderableType] = []
    if summary["eval"]:
        parts.append(_eval_table(summary))
    if summary["reward_per_rollout"]:
        parts.append(_reward_chart(summary, console))
    parts.append(_phase_table(summary))
    parts.append(_hints(run_dir, hints))
    spaced = [item for part in parts for item in (part, Text())][:-1]
    title = Text(shown(f"run {summary['run']}"))
    panel = Panel(Group(*spaced), title=title, title_align="left", padding=(1, 2), expand=False)
    console.print(panel, soft_wrap=False, markup=False)


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for name in others:
        table.add_column(name, justify="right")
    return table


def _eval_table(summary: Summary) -> Table:
    table = _table("evaluation", "before", "after", "change")
    for name, series in summary["eval"].items():
        before = series["values"][0]
        after = series["values"][-1]
        style = "green" if after > before else "red" if after < before else ""
        change = Text(f"{after - before:+.3f}", style=style)
        table.add_row(
            Text(shown(name)), f"{before:.3f}", Text(f"{after:.3f}", style="bold"), change
        )
    return table


def _reward_chart(summary: Summary, console: Console) -> Group:
    rewards = summary["reward_per_rollout"]
    title = Text.assemble(
        ("reward per rollout", "bold"), f"   {rewards[0]:.3f} → {rewards[-1]:.3f}"
    )
    plain = not console.encoding.lower().startswith("utf")
    width = max(min(console.width - 18, 64), 16)
    return Group(
        title,
        *(Text(line, style="cyan") for line in bar_chart(rewards, width=width, ascii_only=plain)),
    )


def _phase_table(summary: Summary) -> Table:
    table = _table("time per phase", "seconds", "share")
    total = max(summary["seconds_total"], 1e-9)
    for name, seconds in summary["seconds_per_phase"].items():
        table.add_row(name.replace("_", " "), f"{seconds:.1f}", f"{seconds / total:.0%}")
    table.add_row(Text("total", style="bold"), Text(f"{total:.1f}", style="bold"), "")
    return table


def _hints(run_dir: RunDir, hints: list[str] | None) -> Group:
    folder = _relative(run_dir.path)
    picture = f"picture      {folder}/{run_dir.reward_curve.name}"
    lines = [
        f"curves       slime ui {shlex.quote(folder)}",
        *([picture] if run_dir.reward_curve.is_file() else []),
        f"texts        {folder}/samples/",
        *(hints or []),
    ]
    return Group(Text("where to look next", style="bold"), *(Text(shown(line)) for line in lines))


def _relative(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _evaluations(rows: list[Row]) -> dict[str, Series]:
    """Return the evaluations by data set."""
    series: dict[str, Series] = {}
    rollouts_done = 0
    for row in rows:
        if _reward(row) is not None:
            rollouts_done += 1
        for name, found in figures(
            {name: value for name, value in row.items() if value is not None}
        ).items():
            if "reward" in found:
                entry = series.setdefault(name, {"steps": [], "values": []})
                step = row.get("eval/step")
                entry["steps"].append(rollouts_done if step is None else step)
                entry["values"].append(float(found["reward"]))
    return series


def _stepping(rows: Iterable[Row]) -> float:
    return sum(row.get("perf/step_time") or 0.0 for row in rows)


def _reward(row: Row) -> float | None:
    return next((row[key] for key in REWARD_KEYS if row.get(key) is not None), None)


def _phases(rows: list[Row], total: float) -> dict[str, float]:
    """Return the seconds of each phase of the loop, and the rest of the total as
    ``start_and_rest``.

    A phase can be logged twice: by the driver, and by the process that did the work. These are rows
    of different kinds, so the larger sum of both kinds is taken.
    """
    known: dict[str, float] = {}
    for name in PHASES:
        by_kind: dict[bool, float] = {}
        for row in rows:
            kind = "eval/step" in row
            by_kind[kind] = by_kind.get(kind, 0.0) + (row.get(f"perf/{name}_time") or 0.0)
        seconds = round(max(by_kind.values()), 2)
        if seconds > 0:
            known[name] = seconds
    rest = round(total - sum(known.values()), 2)
    return {**known, "start_and_rest": rest} if rest > 0 else known


def _config(run_dir: RunDir) -> JsonObject:
    if not run_dir.config.is_file():
        return {}
    try:
        return read_settings(run_dir.config)
    except UnreadableRun as error:
        raise MetricsError(str(error)) from error


def _total_on_disk(run_dir: RunDir) -> float | None:
    if not run_dir.summary.is_file():
        return None
    try:
        seconds = parse_json(regular(run_dir.summary).read_text(encoding="utf-8"))["seconds_total"]
        return float(seconds) if seconds is not None and math.isfinite(seconds) else None
    # the run was killed while it wrote it
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None
