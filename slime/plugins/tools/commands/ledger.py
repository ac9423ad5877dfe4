"""``slime ledger``: show the outcome of each prompt group of a run, and check that none is lost or counted twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.errors import CommandError
from slime.observability.regular import shown

if TYPE_CHECKING:
    from rich.table import Table

    from slime.checkpoint.ledger import Line
    from slime.plugins.tools.summary.ledger_report import Report

_MOST_ROWS = 20


def show_ledger(path: Path, as_json: bool = False) -> int:
    """Print the ledger of a run (a folder or a ledger file) as of its last checkpoint.

    Returns:
        0 if the ledger is consistent, otherwise 1; also 1 if it could not be checked.

    Raises:
        CommandError: There is no ledger, or it cannot be read.
    """
    from rich.console import Console

    from slime.observability.regular import regular
    from slime.observability.run_dir import RunDir
    from slime.plugins.tools.summary.ledger_report import UNCHECKED, read_ledger

    file = RunDir(path.resolve()).ledger if path.is_dir() else path
    try:
        report = read_ledger(regular(file) if path.is_dir() else file)
    except FileNotFoundError as error:
        raise CommandError(f"{file} does not exist: pass the folder of a run, e.g. outputs/latest") from error
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror or error}") from error
    if as_json:
        print(json.dumps({"closes": report.closes, "asked": report.asked, **vars(report)}, indent=2))
        return int(not report.closes)
    console = Console(highlight=False, markup=False)
    for table in _tables(report):
        console.print(table)
    for undone in report.rolled_back:
        text = (
            f"attempt {undone['attempt']} continued after step {undone['after']}: {undone['rows']} groups that later "
            f"steps had closed were rolled back ({_intervals(undone['groups'])})"
        )
        console.print(shown(text))
    if report.beyond:
        console.print(f"{report.beyond} groups were closed after the last checkpoint: a resume generates them again")
    for problem in report.problems:
        if problem == UNCHECKED:
            console.print(f"not checked: {problem}, so there are no sums to compare the groups with")
        else:
            console.print(f"inconsistent: {shown(problem)}", style="red")
    if report.closes and report.cut is not None:
        console.print(f"consistent: {report.asked} groups were requested, and each is in exactly one place")
    return int(not report.closes)


def _tables(report: Report) -> list[Table]:
    from rich.table import Table

    cut = report.cut
    table = Table(title=f"groups as of step {shown(cut['cut'])}" if cut else "groups before the first checkpoint")
    table.add_column("state")
    table.add_column("groups", justify="right")
    places = [*report.counts.items()]
    if cut:
        places += [("ahead of training", len(cut["ahead"])), ("open", len(cut["open"]))]
    for state, count in places:
        table.add_row(shown(state), str(count))
    versions = Table(title="trained groups by the weight versions of their tokens")
    versions.add_column("versions")
    versions.add_column("groups", justify="right")
    for names, count in list(report.versions.items())[-_MOST_ROWS:]:
        versions.add_row(shown(names) or "-", str(count))
    tables = [table, versions]
    if cut and cut["open"]:
        tables.append(_open_groups(cut["open"]))
    return tables


def _open_groups(rows: list[Line]) -> Table:
    from rich.table import Table

    table = Table(title=f"open groups ({min(len(rows), _MOST_ROWS)} of {len(rows)})")
    for name in ("group", "state", "asked in", "versions", "tokens", "returns"):
        table.add_column(name)
    for row in rows[:_MOST_ROWS]:
        names = " ".join(row["versions"])
        cells = (row["group"], row["state"], row["asked"], names or "-", row.get("tokens", 0), row.get("returns", 0))
        table.add_row(*map(shown, cells))
    return table


def _intervals(intervals: list[list[int]]) -> str:
    return ", ".join(str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in intervals) or "none"
