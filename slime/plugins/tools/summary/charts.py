"""The reward curve as text and as a PNG image."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.observability.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .figures import Summary

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PHASE_COLORS = (
    *("#4C72B0", "#DD8452", "#55A868", "#8172B3", "#C9A227", "#C44E52"),
    *("#64B5CD", "#8C564B", "#E377C2", "#2F4B7C", "#BCBD22", "#17BECF"),
)
_EVAL_COLORS = ("#C44E52", "#55A868", "#8172B3", "#DD8452", "#64B5CD", "#8C564B")


def bar_chart(
    values: Sequence[float], height: int = 6, width: int = 60, ascii_only: bool = False
) -> list[str]:
    """Draw one bar per value as lines of text.

    The axis begins at 0, or at the minimum if it is negative. It ends at 1 if the maximum is
    between 0 and 1 or all values are the same and not positive, otherwise at the maximum. If there
    are too many values, they are averaged into ``width // 2`` bars.

    >>> print("\\n".join(bar_chart([0.0, 0.5, 1.0], height=2)))
     1.00 ┤    ██
     0.00 ┤ ██ ██
    """
    if not values:
        return []
    bars = _rebin(list(values), max(width // 2, 1))
    low = min(0.0, *bars)
    high = max(bars) if max(bars) > 1.0 or low < max(bars) <= 0.0 else 1.0
    span = (high - low) or 1.0
    cell = max(min(width // len(bars), 4), 2) - 1  # columns of a bar, without the gap of one column
    lines = []
    for row in reversed(range(height)):
        text = "".join(
            _cell((value - low) / span * height - row, ascii_only) * cell + " " for value in bars
        )
        edge = high if row == height - 1 else low if row == 0 else None
        label = " " * 5 if edge is None else f"{edge:5.2f}"
        axis = "|" if ascii_only else "│" if edge is None else "┤"
        lines.append(f"{label} {axis} {text.rstrip()}".rstrip())
    return lines


def _cell(fill: float, ascii_only: bool) -> str:
    if ascii_only:
        return "#" if fill >= 0.5 else " "
    return _EIGHTHS[max(0, min(8, round(fill * 8)))]


def _rebin(values: list[float], count: int) -> list[float]:
    if len(values) <= count:
        return values
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def reward_curve_png(path: Path, summary: Summary) -> Path:
    """Draw the reward per rollout, the evaluations, and the time of each phase.

    Args:
        path: The PNG file to write; its folder is created.
        summary: The result of :func:`slime.plugins.tools.summary.figures.summarize`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (``pip install 'slime-rl[plots]'``).
    """
    figure = reward_curve(summary)
    with replacing(path) as temporary:
        figure.savefig(temporary, facecolor="white", format="png")
    return path


def reward_curve(summary: Summary) -> Figure:
    """Return the picture of :func:`reward_curve_png` as a figure, which a notebook shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A notebook shows a plain figure only after pyplot was imported there."""

        def _repr_png_(self) -> bytes:
            image = io.BytesIO()
            self.savefig(image, facecolor="white", format="png", dpi=100)
            return image.getvalue()

    figure = Picture(figsize=(9, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    phases = {
        name: seconds for name, seconds in summary["seconds_per_phase"].items() if seconds > 0
    }
    rows = (
        figure.subplots(2, 1, gridspec_kw={"height_ratios": [6, 1]})
        if phases
        else [figure.subplots()]
    )
    _draw_rewards(rows[0], summary)
    if phases:
        _draw_phases(rows[1], phases)
    return figure


def _draw_rewards(axes: Axes, summary: Summary) -> None:
    from matplotlib.ticker import MaxNLocator

    rewards = summary["reward_per_rollout"]
    steps = summary.get("rollouts_done") or range(1, len(rewards) + 1)
    axes.plot(
        steps,
        rewards,
        color="#4C72B0",
        linewidth=2,
        marker="o",
        markersize=4,
        label="reward while training",
    )
    axes.fill_between(steps, rewards, color="#4C72B0", alpha=0.08)
    for color, (name, series) in zip(
        itertools.cycle(_EVAL_COLORS), summary["eval"].items(), strict=False
    ):
        points = sorted(zip(series["steps"], series["values"], strict=True))
        x = [point[0] for point in points]
        y = [point[1] for point in points]
        label = _plain(f"evaluation: {name}")
        axes.plot(x, y, color=color, linestyle=":", linewidth=1.2, alpha=0.7)
        axes.plot(x, y, color=color, linestyle="", marker="D", markersize=8, label=label)
        for step, value in {points[0], points[-1]}:
            axes.annotate(f"{value:.2f}", (step, value), textcoords="offset points", xytext=(0, 10),
                          ha="center", color=color, fontweight="bold")  # fmt: skip
    title = (
        f"{summary['run']}: {summary['num_rollouts']} rollouts in {summary['seconds_total']:.0f} s"
    )
    axes.set_title(_plain(title), loc="left", fontweight="bold")
    axes.set_xlabel("rollouts done")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.set_ylabel("mean reward")
    values = [
        *rewards,
        *(value for series in summary["eval"].values() for value in series["values"]),
    ]
    if values and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(0, 1.1)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")


def _plain(text: str) -> str:
    """Return text that matplotlib draws as it is, not as a formula between dollar signs."""
    return text.replace("$", r"\$")


def _draw_phases(axes: Axes, phases: Mapping[str, float]) -> None:
    left = 0.0
    total = sum(phases.values())
    for index, (name, seconds) in enumerate(phases.items()):
        color = "#D9D9D9" if name == "start_and_rest" else _PHASE_COLORS[index % len(_PHASE_COLORS)]
        axes.barh(
            0,
            seconds,
            left=left,
            color=color,
            label=f"{name.replace('_', ' ')} {seconds:.0f} s",
            height=0.8,
        )
        left += seconds
    axes.set_xlim(0, total)
    axes.set_axis_off()
    axes.legend(
        ncols=6,
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        fontsize=8,
        handlelength=1,
    )
