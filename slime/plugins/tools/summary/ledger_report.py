"""Read a ledger file, and check that it is consistent, using only its rows and not the sums of the
run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from slime.checkpoint.ledger import CLOSED, Line, balance, parse_line
from slime.checkpoint.numbers import Numbers
from slime.observability.regular import LONGEST_LINE

UNCHECKED = "the run has reached neither a snapshot nor its end"
"""The problem of a ledger that has no sums yet with which its rows could be compared."""


@dataclass
class Report:
    """The contents of a ledger file up to its last snapshot.

    Attributes:
        counts: Number of closed groups by state.
        cut: The line of the last snapshot, or None if the run reached none.
        beyond: Number of rows after that line, which no snapshot contains yet.
        rolled_back: One entry per resume, ``{"attempt", "after", "groups", "rows"}``.
        versions: Number of trained groups by the weight versions that generated them.
        problems: Why the ledger is inconsistent; empty if it is consistent.
    """

    counts: Counter[str] = field(default_factory=Counter)
    cut: Line | None = None
    beyond: int = 0
    rolled_back: list[Line] = field(default_factory=list)
    versions: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def closes(self) -> bool:
        """Whether the ledger is consistent."""
        return not self.problems

    @property
    def asked(self) -> int:
        return sum(self.counts.values()) + (
            len(self.cut["open"]) + len(self.cut["ahead"]) if self.cut else 0
        )


def read_ledger(path: Path) -> Report:
    """Count all rows, and compare the counts with the sums at each snapshot.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: It cannot be read.
    """
    report = Report()
    closed = Numbers()
    again: set[tuple[int, int]] = set()
    with open(path, "rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
            try:
                closed = _line(report, parse_line(raw), closed, again, number)
            # a file that was damaged or edited
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                report.problems.append(f"line {number} is damaged: {type(error).__name__}: {error}")
    if report.cut is None:
        report.problems.append(UNCHECKED)
    return report


def _line(
    report: Report, line: Line, closed: Numbers, again: set[tuple[int, int]], number: int
) -> Numbers:
    """Count one line, and return the groups that are closed after it."""
    if "group" in line:
        _row(report, line, closed, again, number)
    elif "cut" in line:
        _cut(report, line, closed)
    elif "rolled_back" in line:
        report.rolled_back.append(line["rolled_back"])
        report.beyond = 0
    elif "base" in line:
        report.counts.update(line["base"]["counts"])
        return Numbers(line["base"]["closed"])
    else:
        report.problems.append(f"line {number} is not a complete JSON object")
    return closed


def _row(
    report: Report, row: Line, closed: Numbers, again: set[tuple[int, int]], number: int
) -> None:
    group = row["group"]
    turn = row.get("again", 0)
    if (turn and (group, turn) in again) or (not turn and group in closed):
        report.problems.append(f"line {number}: group {group} is closed a second time")
    if row["state"] not in CLOSED:
        report.problems.append(
            f"line {number}: group {group} is {row['state']!r}, which is not a final state"
        )
    if row["state"] == "trained" and report.cut is not None and row["rollout"] <= report.cut["cut"]:
        report.problems.append(
            f"line {number}: group {group} trained in step {row['rollout']}, before the checkpoint"
        )
    again.add((group, turn)) if turn else closed.add(group)
    report.counts[row["state"]] += 1
    report.beyond += 1
    if row["state"] == "trained":
        report.versions[" ".join(row["versions"])] += 1


def _cut(report: Report, line: Line, closed: Numbers) -> None:
    where = f"checkpoint after step {line['cut']}"
    report.problems += [f"{where}: {problem}" for problem in balance(line)]
    said: Counter[str] = Counter(line["counts"])
    for state in sorted(said.keys() | report.counts.keys()):
        if said[state] != report.counts[state]:
            told = f"{said[state]} groups {state}, but the rows give {report.counts[state]}"
            report.problems.append(f"{where}: its sums give {told}")
    everything = Numbers(closed.intervals)
    for row in [*line["open"], *line["ahead"]]:
        if row["group"] in everything and not row.get("again"):
            report.problems.append(f"{where}: group {row['group']} is closed and open")
        everything.add(row["group"])
    if everything.intervals != line["given"]:
        missing = Numbers(line["given"]).missing_in(everything)[:8]
        strange = everything.missing_in(Numbers(line["given"]))[:8]
        report.problems.append(
            f"{where}: groups that were lost: {missing or 'none'}; groups never supplied: "
            f"{strange or 'none'}"
        )
    report.cut = line
    report.beyond = 0
