"""What the end of a run and ``slime summary`` show: the figures of a run, its table and its
picture.

Here is what a run has recorded in its folder: its state, attempts, sent weights, traces and dumps; and
its ledger, with a check that it is consistent by its rows alone.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from slime.checkpoint.ledger import CLOSED, Line, balance, parse_line
from slime.checkpoint.numbers import Numbers
from slime.observability.debug_data import file_of_rollout
from slime.observability.files import LONGEST_LINE, MOST_BYTES, parse_json, regular
from slime.observability.run_dir import RunDir
from slime.observability.run_state import FILE, RunState, SentWeights, Settled
from slime.types import JsonObject

PHASES = (
    *("rollout", "offload", "wake_up", "train", "update_weights", "sleep", "onload"),
    *("audit_weights", "eval", "save_model"),
)
"""The phases of a step whose seconds are metrics, ``perf/<phase>_time``."""
MOST_NAMED = 6
"""So many runs are named to somebody who gave another path."""


def runs_in(place: Path) -> list[Path]:
    """Return the folders of runs that a path means: itself, or those in it.

    Links such as ``latest`` in a folder of runs are not followed, since they point to another run
    of it.
    """
    if (place / "config.yaml").is_file():
        return [place.resolve()]
    try:
        inside = sorted(place.iterdir())
    except OSError:
        return []
    return [
        folder.resolve()
        for folder in inside
        if not folder.is_symlink() and (folder / "config.yaml").is_file()
    ]


def no_run(place: Path) -> str:
    """Return a text that says why a path is not the folder of a run, and which runs are near it,
    the newest first.
    """
    if place.is_dir():
        why = f"{place} is not the folder of a run: it has no config.yaml"
    elif place.exists():
        why = f"{place} is a file, not the folder of a run"
    else:
        why = f"{place} does not exist"
    near = next((found for folder in (place, place.parent) if (found := runs_in(folder))), [])
    near.sort(key=lambda folder: -(folder / "config.yaml").stat().st_mtime)
    if not near:
        return (
            f"{why}; a run writes its folder to --output-dir (default: outputs, where the run was "
            "started)"
        )
    more = f" and {len(near) - MOST_NAMED} more" if len(near) > MOST_NAMED else ""
    return f"{why}; runs near it: {', '.join(map(str, near[:MOST_NAMED]))}{more}"


@dataclass(frozen=True)
class Attempt:
    """One start of a run: the settings as in ``config.yaml``, and what the start has settled."""

    settled: Settled
    settings: JsonObject


def read_attempts(run: RunDir) -> list[Attempt]:
    """Return the attempts, oldest first; none for a run of an older release, or one that ended
    during its start.
    """
    attempts = []
    for line in _lines(run.attempts):
        try:
            values = parse_json(line)
            attempt = Attempt(Settled(**values["settled"]), dict(values["settings"]))
        # the driver was killed while it wrote the last line
        except (ValueError, TypeError, KeyError):
            continue
        if _is_settled(attempt.settled):
            attempts.append(attempt)
    return attempts


def _lines(path: Path) -> list[bytes]:
    try:
        return regular(path).read_bytes().splitlines()
    except OSError:
        return []


def _is_settled(settled: Settled) -> bool:
    counts = (settled.num_rollout, settled.threads, settled.first_rollout)
    budgets = (settled.max_tokens or 1, settled.forward_tokens or 1)
    return _fits(vars(settled), Settled) and min(counts) >= 0 and min(budgets) > 0


def _fits(values: Mapping[str, object], kind: type) -> bool:
    """Whether values that were read from a file have the types of a class."""
    hints = get_type_hints(kind)
    return all(_is_a(value, hints[name]) for name, value in values.items() if name in hints)


def _is_a(value: object, hint: object) -> bool:
    choices = get_args(hint) or (hint,)
    if get_origin(hint) is Literal:
        return value in choices
    if isinstance(value, Mapping):
        kind = choices[-1]  # of an entry, if this is no class
        if is_typeddict(hint):
            return _fits(value, kind)
        return get_origin(hint) is not None and all(_is_a(one, kind) for one in value.values())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return type(value) in choices
    return (type(value) in choices or float in choices) and abs(value) < 1e12


def lineage(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts that made the steps of the run, by their first rollouts.

    An attempt that is resumed before the first rollout of an earlier one has trained all steps of
    that one again.
    """
    kept: list[Attempt] = []
    for attempt in attempts:
        first = attempt.settled.first_rollout
        kept = [*(one for one in kept if one.settled.first_rollout < first), attempt]
    return kept


def read_weights(path: Path) -> dict[int, SentWeights]:
    """Return the last record for each number of trained rollouts; a resumed run replaces what it
    trained again.
    """
    by_step: dict[int, SentWeights] = {}
    for line in _lines(path):
        try:
            sent = SentWeights(**parse_json(line))
            by_step[sent.step] = sent
        # The driver was killed while it wrote the last line, or the file is damaged.
        except (ValueError, TypeError, AttributeError):
            continue
    return by_step


def read_state(folder: Path) -> RunState | None:
    """Return the state in the folder of a run; None if there is none (a run of an older release),
    or it is damaged.
    """
    try:
        state = RunState(**parse_json(regular(folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return state if _fits(vars(state), RunState) and 0 < state.pid < 2**31 else None


def end_of(path: Path, most: int) -> tuple[str, int]:
    """Return the last ``most`` bytes of a log as text, and its size; nothing of no regular file."""
    try:
        with regular(path).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - most, 0))
            return file.read().decode("utf-8", "replace"), size
    except OSError:
        return "", 0


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace file.

    Raises:
        ValueError: The file is damaged, or its content is larger than :data:`MOST_BYTES`.
    """
    with gzip.open(regular(path)) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES / 2**30:g} GiB of text: it is not read")
    events: list[dict[str, Any]] = parse_json(content)["traceEvents"]
    return events


def find_dump(template: object, folder: Path, run_name: object, step: int) -> Path | None:
    """Return the dump of a step, also if the folder of the run was moved or copied with the dumps
    in it.

    Args:
        template: The value of ``--save-debug-train-data`` or ``--save-debug-rollout-data``, as the
            run recorded it.
        folder: The folder of the run.
        run_name: Its ``--run-name``.
    """
    if not isinstance(template, str):
        return None
    try:
        named = file_of_rollout(template, step)
    except (ValueError, RuntimeError):
        return None
    places = [named, folder / named, folder.parent.parent / named]
    names = [folder.name, run_name] if isinstance(run_name, str) else [folder.name]
    places += [
        folder / Path(*named.parts[named.parts.index(name) + 1 :])
        for name in names
        if name in named.parts
    ]
    return next((place for place in places if place.is_file()), None)


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
    if turn:
        again.add((group, turn))
    else:
        closed.add(group)
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
            difference = f"{said[state]} groups {state}, but the rows give {report.counts[state]}"
            report.problems.append(f"{where}: its sums give {difference}")
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
