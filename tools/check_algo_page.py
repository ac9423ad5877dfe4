"""Write the table and the picture of docs/en/check_algo.md:

    python tools/check_algo_page.py [ESTIMATOR ...]

It takes half a minute for each estimator. With names, only their rows are written, and no picture.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from slime.plugins.tools.check_algo import DESIGN, Report, check_algorithm  # noqa: E402
from slime.plugins.tools.check_algo.lab import STALENESS, Measured, make_args  # noqa: E402
from slime.registry import parts  # noqa: E402

PAGE = ROOT / "docs" / "en" / "check_algo.md"
PICTURE = ROOT / "docs" / "images" / "check_algo.png"
TABLE = "<!-- table: python tools/check_algo_page.py -->"
END = "<!-- end of the table -->"
HEAD = """\
| estimator | 0 | 1 | 4 | lengths | var 0 | var 4 | verdict | other effects of its design |
|---|---|---|---|---|---|---|---|---|"""
REASONS = tuple(dict.fromkeys(reason for reasons in DESIGN.values() for reason in reasons.values()))
DRAWN = "rloo", "grpo", "gspo", "maxrl", "vespo", "reinforce_plus_plus"


def row(report: Report) -> str:
    """Return an estimator's row of the table."""
    bias = [f"{100 * one.bias:.1f}" for one in report.rows[:4]]
    variance = [f"{report.rows[i].to_rloo:.2f}" for i in (0, 2)]
    designs = {
        one.name: f"({REASONS.index(one.reason) + 1})"
        for one in report.checks
        if one.state == "by design"
    }
    direction = designs.pop("direction", None)
    verdict = f"biased {direction}" if direction and not report.failing else report.verdict
    others = ", ".join(f"{name} {number}" for name, number in designs.items())
    return f"| {' | '.join([f'`{report.name}`', *bias, *variance, verdict, others or '-'])} |"


def notes() -> str:
    """Return the reasons that the numbers in the rows stand for."""
    return "\n".join(f"{number}. {reason}" for number, reason in enumerate(REASONS, 1))


def rows_of(page: str) -> dict[str, str]:
    """Return the rows of the page by the name of the estimator."""
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: line for line in lines}


def draw(rows: Mapping[str, Sequence[Measured]], path: Path) -> None:
    """Write a PNG with the bias and the variance of estimators at each staleness."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for place, (name, measured) in enumerate(rows.items()):
        style = {"linestyle": ("-", "--", ":")[place % 3], "marker": "osv^"[place % 4]}
        stale = [row for row in measured if row.name.startswith("staleness")]
        left.plot(STALENESS, [100 * row.bias for row in stale], label=name, **style)
        right.plot(STALENESS, [row.to_rloo for row in stale], **style)
    left.set_title("bias of the expected gradient, %", loc="left")
    right.set_title("variance, relative to RLOO", loc="left")
    right.axhline(1.0, color="#999999", linewidth=0.8)
    for axes in (left, right):
        axes.set_xlabel("staleness of the samples, in steps")
        axes.set_xticks(STALENESS)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(path, facecolor="white", format="png")


def main(names: list[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    reports = {}
    for name in names or parts("algorithm"):
        reports[name] = check_algorithm(make_args(name))
        print(row(reports[name]), flush=True)
    rows = rows_of(text) | {name: row(report) for name, report in reports.items()}
    table = "\n".join(rows[name] for name in parts("algorithm") if name in rows)
    head, _, rest = text.partition(TABLE)
    tail = rest.partition(END)[2]
    made = f"{HEAD}\n{table}\n\nThe numbers in parentheses are the reasons:\n\n{notes()}"
    PAGE.write_text(f"{head}{TABLE}\n\n{made}\n\n{END}{tail}", encoding="utf-8")
    if not names:
        draw({name: reports[name].rows for name in DRAWN}, PICTURE)


if __name__ == "__main__":
    main(sys.argv[1:])
