"""The table and the picture of docs/en/recipes.md, from the rows that ``recipes.py`` writes."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from recipe_kinds import RECIPES

CHECKOUT = Path(__file__).resolve().parents[1]
PAGE = CHECKOUT / "docs" / "en" / "recipes.md"
PICTURE = CHECKOUT / "docs" / "images" / "recipes.png"
SHARED = "--colocate --no-offload-train --no-offload-rollout"
"""Flags that the page names once."""
BEGIN, END = "<!-- table: python benchmarks/recipes.py --page FILE -->", "<!-- end of the table -->"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Mean reward of each rollout, one line a run: the recipes of the first task, and the others."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture without matplotlib", flush=True)
        return

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    panels = figure.subplots(1, 2)
    looks = {name: (f"C{at % 10}", "--" if at > 9 else "-") for at, name in enumerate(RECIPES)}
    named: set[str] = set()
    for row in rows:
        name, rewards = row["recipe"], row.get("rewards") or []
        recipe, window = RECIPES[name], 5
        smooth = [
            statistics.fmean(rewards[max(0, at + 1 - window) : at + 1])
            for at in range(len(rewards))
        ]
        label = None if name in named else recipe.what
        named.add(name)
        panels[int(recipe.task != "arithmetic" or recipe.teacher)].plot(
            smooth, color=looks[name][0], ls=looks[name][1], label=label, linewidth=1.2
        )
    for axes in panels:
        axes.set_xlabel("rollout")
        axes.set_ylabel("mean reward (mean of five rollouts)")
        axes.set_ylim(0, 1)
        if axes.lines:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=100)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of the page, one for each recipe; several seeds are separated by commas."""
    lines = [
        "| recipe | flags | held out, before → after | mean reward | gap | step, s | run, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, recipe in RECIPES.items():
        own = [row for row in rows if row["recipe"] == name and row["exit_code"] == 0]
        if not own:
            continue
        accuracy = ", ".join(
            f"{row['accuracy_before']:.2f} → {row['accuracy_after']:.2f}" for row in own
        )
        mean = ", ".join(f"{statistics.fmean(row['rewards']):.2f}" for row in own)
        step, gap = (
            statistics.median(values) if (values := [r[key] for r in own if r.get(key)]) else None
            for key in ("step_seconds", "logprob_gap")
        )
        seconds = ", ".join(f"{row['seconds']:.0f}" for row in own)
        start = "" if recipe.script == "train.py" else f"`{recipe.script}` "
        flags = " ".join(recipe.flags.replace(SHARED, "").split())
        flags = f"{start}`{flags}`" if flags else ""
        lines.append(
            f"| {recipe.what} | {flags} | {accuracy} | {mean} | {f'{gap:.3f}' if gap else ''} | "
            f"{step or 0:.2f} | {seconds} |"
        )
    return "\n".join(lines)


def write_page(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END, 1)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", encoding="utf-8")
    draw(rows, PICTURE)
