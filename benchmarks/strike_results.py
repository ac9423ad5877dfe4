"""What struck runs left: their numbers beside an undisturbed run's, their last words, and the table
of all cells.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from strike_cells import PHASES, TARGETS, Cell, all_cells

from slime.plugins.tools.summary import read_weights


def steps_in(run: Path) -> dict[int, dict[str, Any]]:
    """The complete rows of ``metrics.jsonl`` that stand for steps, by rollout."""
    found = {}
    with contextlib.suppress(OSError):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if "rollout/step" in row:
                    found[int(row["rollout/step"])] = row
    return found


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """What training did: rewards, losses, gaps; not the clock, nor what the faults were."""
    leave = (
        "perf/",
        "time",
        "memory/",
        "rollout/engine_",
        "rollout/http_",
        "rollout/router_",
        "rollout/buffered",
        "rollout/worker_",
    )
    gone = ("cache", "under_way", "_time", "weight_version", "staleness")
    return {
        k: v
        for k, v in row.items()
        if not k.startswith(leave) and not any(word in k for word in gone)
    }


def differences(run: Path, reference: Path) -> list[str]:
    """The steps and values in which a run differs from an undisturbed one, as far as both went."""
    ours, theirs = steps_in(run), steps_in(reference)
    found = [f"step {step} is missing" for step in range(max(ours, default=-1)) if step not in ours]
    for step in sorted(ours.keys() & theirs.keys()):
        one, two = numbers(ours[step]), numbers(theirs[step])
        found += [
            f"step {step}: {key}" for key in sorted({*one, *two}) if one.get(key) != two.get(key)
        ]
    weights, right = read_weights(run / "weights.jsonl"), read_weights(reference / "weights.jsonl")
    both = weights.keys() & right.keys()
    found += [
        f"weights after {step} steps"
        for step in sorted(both)
        if weights[step].digest != right[step].digest
    ]
    return found if both else [*found, "no digests of weights"]


def last_words(output: str, lines: int = 6) -> str:
    """The end of an output, without the frames of tracebacks."""
    return " | ".join([line.strip() for line in output.splitlines() if line.strip()][-lines:])[
        -1200:
    ]


def clear(message: str) -> bool:
    """Whether the last lines of a run that ended name the cause; an error of Ray alone does not."""
    named = re.search(r"\blost\b|did not|was not healthy|ended|--load", message)
    return named is not None and "ray.exceptions" not in message


def read_results(path: Path) -> dict[Cell, dict[str, Any]]:
    """The last line of each cell."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        values = json.loads(line)
        found[Cell(*(values[name] for name in ("mode", "target", "phase", "signal")))] = values
    return found


def table(results: dict[Cell, dict[str, Any]]) -> str:
    """Markdown: for each mode and signal a table of targets and phases."""
    lines = []
    dates = sorted({values["date"] for values in results.values()})
    commits = sorted({values["commit"] for values in results.values()})
    counted = [values for values in results.values() if values["outcome"] != "absent"]
    lines.append(
        f"Struck on {' and '.join(dates)} at {', '.join(commits)}: {len(counted)} cells, "
        f"{sum(values['ok'] for values in counted)} as promised."
    )
    for mode, number in dict.fromkeys((cell.mode, cell.signal) for cell in all_cells()):
        these = {
            cell: v for cell, v in results.items() if (cell.mode, cell.signal) == (mode, number)
        }
        phases = [
            p
            for p in PHASES
            if any(c.phase == p and v["outcome"] != "absent" for c, v in these.items())
        ]
        if not phases:
            continue
        lines += [
            "",
            f"{mode}, {number}:",
            "",
            f"| target | {' | '.join(phases)} |",
            "|---" * (len(phases) + 1) + "|",
        ]
        for target in TARGETS:
            row = [shown(these.get(Cell(mode, target, phase, number))) for phase in phases]
            if set(row) - {"–", ""}:
                lines.append(f"| {target} | {' | '.join(row)} |")
    return "\n".join(lines)


def shown(values: dict[str, Any] | None) -> str:
    if values is None:
        return ""
    if values["outcome"] == "absent":
        return "–"
    told = f"{values['outcome']} {values['seconds']:.0f} s"
    if values["ok"]:
        return told
    fault = (
        ""
        if values["outcome"] in ("hung", "not reached", "ended")
        else f": {values['message'].partition(':')[0]}"
    )
    return f"**{told}{fault}**"
