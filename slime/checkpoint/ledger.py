"""The ledger of a run: the outcome of each group of prompts. It must be consistent at every
snapshot.

A group is *open* (in flight, or back in the data source), *ahead* (in a rollout that no step has
trained yet) or *closed*: trained, filtered, replaced, left out, discarded or lost. When a rollout
is trained, the rows of its groups are written to ``outputs/<run>/ledger.jsonl``. The other rows are
kept in memory, together with the numbers of all groups that were ever supplied, as intervals. At a
snapshot the ledger must be *consistent*: every supplied group is closed, ahead or open, exactly
once, and the open groups are exactly those that the pool and the data source hold. The snapshot
records the length of the file. A resume removes what was written later and marks it as rolled back.

A full disk does not end a run: rows that cannot be written wait in memory until there is space
again.

The file has one JSON object per line: rows, ``{"cut": ...}`` for each snapshot and at the end,
``{"rolled_back": ...}`` for each resume, and ``{"base": ...}`` if a run continues in another
folder.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.checkpoint.numbers import Numbers
from slime.data.sample import Group, flatten, group_number
from slime.data.staleness import step_of
from slime.observability.files import AppendedFile, parse_json, warn

CLOSED = ("trained", "filtered", "replaced", "left out", "discarded", "lost")
_FILE = "the ledger of the run"
_SHOWN = 8  # maximum number of groups that an error names


class LedgerError(AssertionError):
    """The ledger is inconsistent: a group was lost or used twice. The message names the groups."""


Line = dict[str, Any]
"""One JSON object of the file, or a row inside one (see the module). A snapshot contains its
``cut`` line, the last ``complete`` rollout, the ``position`` in the file, and the groups that were
supplied ``again``."""


@dataclass
class Row:
    """One group. ``versions`` are the weight versions that generated its tokens, the oldest
    first.
    """

    group: int
    state: str
    asked: int  # rollout in which the data source first supplied it
    rollout: int | None = None  # rollout that judged it; a trained group was trained in this step
    versions: list[str] = field(default_factory=list)
    samples: int = 0
    rewarded: int = 0  # samples with a reward
    tokens: int = 0  # response tokens
    returns: int = 0  # how often it was returned to the data source
    reason: str | None = None  # why it was filtered, left out or discarded
    again: int = 0  # how often user code put it back after it was closed

    def line(self) -> Line:
        """Return the row for the file, without the values that are defaults."""
        defaults = {"rollout": None, "tokens": 0, "returns": 0, "reason": None, "again": 0}
        return {
            name: value for name, value in vars(self).items() if value != defaults.get(name, ...)
        }

    def take_in(self, group: Group) -> None:
        """Update the row from the samples of the group."""
        leaves = flatten(group)
        # A sample of an engine that reports no spans has only the list of versions, one with spans
        # may have both.
        made = {
            v
            for sample in leaves
            for v in [*sample.weight_versions, *(span[0] for span in sample.version_spans)]
        }
        self.versions = sorted(made, key=lambda version: (step_of(version) or 0, version))
        self.samples, self.tokens = len(leaves), sum(sample.response_length for sample in leaves)
        self.rewarded = sum(sample.reward is not None for sample in leaves)


@dataclass
class Cut:
    """The state of the ledger when the generation of a rollout ended."""

    open: list[Line]
    given: list[list[int]]
    repeats: int = 0


class Ledger:
    """Records every group of a run. The rollout manager owns it; it is thread-safe.

    Args:
        path: The file.
        strict: Every group comes from the built-in data source through the built-in loops, so any
            difference is an error. Otherwise user code may take groups and put them back, and the
            ledger adopts what it finds.
        keeps: Whether the data source keeps the groups that are returned to it.
    """

    def __init__(self, path: Path, strict: bool = True, keeps: bool = True) -> None:
        self.path, self.strict, self.keeps = path, strict, keeps
        self.open: dict[int, Row] = {}
        self.given = Numbers()
        self.current: list[Row] = []  # groups judged since the last complete rollout
        self.rollouts: dict[int, list[Row]] = {}  # complete rollouts that are not trained yet
        self.next_rollout = 0  # the rollout that is being collected
        self.again: dict[int, int] = {}  # how often user code put back a closed group
        self.cuts: dict[int, Cut] = {}
        self.counts: Counter[str] = Counter()  # states of the rows in the file
        self.attempt = 0
        self.unnumbered = 0
        self.trained_to = -1
        self._lock = threading.RLock()
        self._last_cut: Line | None = None
        self._file = AppendedFile(path, _FILE)

    # --- what the loops say ------------------------------------------------------------------

    def __call__(self, event: str, group: Group, facts: Mapping[str, object]) -> None:
        """Record an event of a group; an :data:`~slime.rollout.state.Observer` of the rollout
        loops.

        Raises:
            LedgerError: The group was supplied although it is closed or in flight, or judged
                although it is not open.
        """
        number = group_number(group)
        with self._lock:
            # A data source of the user's may assign no numbers; then groups are only counted.
            if number is None:
                self.unnumbered += event == "asked"
            elif event == "asked":
                self._asked(number, group)
            elif event == "given_back":
                self._returned(number, group)
            elif event in ("accepted", "filtered", "replaced"):
                reason = facts.get("reason")
                self._judged(number, group, event, None if reason is None else str(reason))

    def _asked(self, number: int, group: Group) -> None:
        row = self.open.get(number)
        if row is None:
            row = self._enter(number)
        elif row.state != "returned" and self.strict:
            raise LedgerError(
                f"group {number} was supplied while it was in flight: it would be used twice"
            )
        row.state = "under way"
        row.take_in(group)

    def _enter(self, number: int) -> Row:
        again = 0
        if number in self.given:
            if self.strict:
                raise LedgerError(
                    f"group {number} was supplied again although it is closed (see {self.path})"
                )
            self.again[number] = again = self.again.get(number, 0) + 1
        self.given.add(number)
        row = self.open[number] = Row(number, "under way", self.next_rollout, again=again)
        return row

    def _judged(self, number: int, group: Group, verdict: str, reason: str | None = None) -> None:
        # User code may return groups that it has made itself; the built-in loops only judge what
        # they were given.
        if number not in self.open and self.strict:
            raise LedgerError(
                f"group {number} was {verdict} in rollout {self.next_rollout} but was not in flight"
            )
        row = self.open.get(number) or self._enter(number)
        row.take_in(group)
        self._close(row, verdict, reason)

    def _returned(self, number: int, group: Group) -> None:
        row = self.open.get(number) or self._enter(number)
        row.take_in(group)
        row.returns += 1
        row.state = "returned"
        if not self.keeps:
            self._close(row, "lost", "the data source has no buffer")

    def discarded(self, groups: Sequence[Group]) -> None:
        """Record groups that the buffer filter dropped."""
        with self._lock:
            for group in groups:
                row = self.open.get(number) if (number := group_number(group)) is not None else None
                if row is not None:
                    self._close(row, "discarded", "the buffer filter dropped it")

    def _close(self, row: Row, state: str, reason: str | None) -> None:
        del self.open[row.group]
        row.state, row.reason, row.rollout = state, reason, self.next_rollout
        self.current.append(row)

    # --- what the manager says ---------------------------------------------------------------

    def complete(
        self,
        rollout_id: int,
        groups: Sequence[Group],
        held: Sequence[Group] | None,
        counter: int | None,
    ) -> None:
        """Record that a rollout was generated, and keep the state of the ledger for a snapshot at
        this point.

        Args:
            groups: The result of the rollout.
            held: The open groups that the pool and the data source hold; None if they cannot tell.
            counter: How many groups the data source has numbered; None if it assigns no numbers.

        Raises:
            LedgerError: The ledger is strict, and something differs from the recorded events.
        """
        with self._lock:
            self._match_result(rollout_id, groups)
            if held is not None:
                self._match_held(rollout_id, held)
            if counter is not None:
                self._match_counter(rollout_id, counter)
            for row in self.current:
                row.rollout = rollout_id
            self.rollouts[rollout_id], self.current = self.current, []
            self.next_rollout = rollout_id + 1
            self.cuts[rollout_id] = self._cut_now()

    def _cut_now(self) -> Cut:
        rows = [row.line() for row in self.open.values()]
        return Cut(rows, [list(part) for part in self.given.intervals], sum(self.again.values()))

    def _match_result(self, rollout_id: int, groups: Sequence[Group]) -> None:
        accepted = {row.group: row for row in self.current if row.state == "accepted"}
        result = {number: group for group in groups if (number := group_number(group)) is not None}
        extra = [number for number in result if number not in accepted]
        short = [number for number in accepted if number not in result]
        twice = len(groups) != len(result) and all(
            group_number(group) is not None for group in groups
        )
        if self.strict:
            _demand(
                not extra,
                f"the result of rollout {rollout_id} has groups that were not accepted in it",
                extra,
            )
            _demand(
                not short,
                f"the result of rollout {rollout_id} lacks groups that were accepted in it",
                short,
            )
            _demand(
                not twice, f"the result of rollout {rollout_id} has a group twice", sorted(result)
            )
        for number in extra:  # the rollout function reports no events
            self._judged(number, result[number], "accepted")
        for number in short:
            accepted[number].state, accepted[number].reason = (
                "discarded",
                "not in the result of the rollout",
            )

    def _match_held(self, rollout_id: int, held: Sequence[Group]) -> None:
        found = {number: group for group in held if (number := group_number(group)) is not None}
        lost = [number for number in self.open if number not in found]
        strange = [number for number in found if number not in self.open]
        twice = len(held) != len(found) and all(group_number(group) is not None for group in held)
        if self.strict:
            _demand(
                not lost,
                f"after rollout {rollout_id}, pool and data source lack these open groups",
                lost,
            )
            _demand(
                not strange,
                f"after rollout {rollout_id}, pool or data source keep these closed groups",
                strange,
            )
            _demand(
                not twice,
                f"after rollout {rollout_id}, pool and data source have a group twice",
                sorted(found),
            )
        # Not strict: what is held nowhere was used or dropped by user code, and what is held again
        # was put back by it.
        for number in lost:
            self._close(self.open[number], "discarded", "neither in the result nor returned")
        for number in strange:
            self._enter(number).state = "returned"
        for number, row in self.open.items():
            row.take_in(found[number])

    def _match_counter(self, rollout_id: int, counter: int) -> None:
        missing = Numbers([[0, counter]] if counter else []).missing_in(self.given)
        if self.strict:
            _demand(
                not missing,
                f"after rollout {rollout_id}, the ledger lacks groups that were supplied",
                missing,
            )
        for number in missing:
            self._close(self._enter(number), "discarded", "taken by user code")

    def left_out(self, rollout_id: int, trained: Iterable[int]) -> None:
        """Record that of a complete rollout only the groups ``trained`` fill whole steps; the
        others are left out.
        """
        kept = set(trained)
        with self._lock:
            for row in self.rollouts.get(rollout_id, []):
                if row.state == "accepted" and row.group not in kept:
                    row.state, row.reason = "left out", "too few groups were left for another step"

    def trained(self, rollout_id: int) -> None:
        """Record that all rollouts up to this one are trained, and write their rows to the file."""
        with self._lock:
            for done in sorted(r for r in self.rollouts if r <= rollout_id):
                rows = self.rollouts.pop(done)
                for row in rows:
                    row.state = "trained" if row.state == "accepted" else row.state
                self.counts.update(row.state for row in rows)
                self._append(row.line() for row in rows)
            self.trained_to = max(self.trained_to, rollout_id)
            # A snapshot may still ask for the state after the newest complete rollout, and for that
            # of rollouts ahead.
            newest = max(self.cuts, default=-1)
            self.cuts = {r: cut for r, cut in self.cuts.items() if r >= rollout_id or r == newest}

    # --- checkpoints -------------------------------------------------------------------------

    def cut(self, trained: int, complete: int) -> Line:
        """Write the state of the ledger for a snapshot to the file, and return it for the snapshot.

        Args:
            trained: The last rollout that is trained.
            complete: The last rollout that is generated.

        Raises:
            LedgerError: The ledger is inconsistent.
        """
        with self._lock:
            self.trained(trained)
            if complete not in self.cuts and complete >= 0:
                raise LedgerError(
                    f"the ledger has no state of rollout {complete}, only of {sorted(self.cuts)}"
                )
            at = self.cuts.get(complete, Cut([], []))
            ahead = [
                r.line() for n in sorted(self.rollouts) if n <= complete for r in self.rollouts[n]
            ]
            line = {
                "cut": trained,
                "attempt": self.attempt,
                "counts": dict(self.counts),
                "ahead": ahead,
                **vars(at),
            }
            line["unnumbered"] = self.unnumbered
            # This is the point of the ledger: an inconsistent one must not get into a snapshot.
            problems = balance(line)
            if problems:
                raise LedgerError(
                    f"the ledger is inconsistent after rollout {trained}: {'; '.join(problems)}"
                )
            if line != self._last_cut:
                self._append([line])
                self._last_cut = line
            return {
                **line,
                "complete": complete,
                "position": self._file.end,
                "again": dict(self.again),
            }

    def restore(self, state: Line, attempt: int) -> None:
        """Continue from the state in a snapshot. What was written to the file after it is rolled
        back.
        """
        with self._lock:
            # First the state in memory, as it was when the snapshot's last rollout was complete.
            self.attempt = attempt
            self.counts = Counter(state["counts"])
            self.given = Numbers(state["given"])
            self.again = dict(state.get("again") or {})
            self.unnumbered = state.get("unnumbered", 0)
            self.open = {row["group"]: Row(**row) for row in state["open"]}
            for row in self.open.values():
                row.state = "returned"  # the restored data source supplies them again
            self.trained_to = state["cut"]
            for line in state["ahead"]:
                self.rollouts.setdefault(line["rollout"], []).append(Row(**line))
            self.next_rollout = state["complete"] + 1
            self.cuts = {state["complete"]: self._cut_now()}
            whole = self._file.end >= state["position"]
            if whole and self._has_cut(state):
                self._roll_back(state)
                return
            # another run's, or rows waited for disk space at a kill, or the power failed
            if self._file.end:
                lost = self.path.with_name(f"{self.path.stem}.lost{self.path.suffix}")
                self.path.replace(lost)
                self._file = AppendedFile(self.path, _FILE)
                why = (
                    "is of another run than the snapshot"
                    if whole
                    else "had fewer rows than the snapshot records"
                )
                warn(
                    f"{self.path} {why}: it was moved to {lost.name}, and the ledger continues "
                    "with the sums of the snapshot"
                )
            # A reader of the new file needs to know which groups were closed before it begins.
            closed = Numbers(state["given"])
            for line in [*state["open"], *state["ahead"]]:
                closed.remove(line["group"])
            self._append([{"base": {"counts": dict(self.counts), "closed": closed.intervals}}])

    def _has_cut(self, state: Line) -> bool:
        """Whether the file has the line of this snapshot where the snapshot says; the file of
        another run has not.
        """
        with open(self.path, "rb") as file:
            line = parse_line(file.read(state["position"]).removesuffix(b"\n").rpartition(b"\n")[2])
        return "cut" in line and line == json.loads(
            json.dumps({name: state.get(name) for name in line})
        )

    def _roll_back(self, state: Line) -> None:
        with open(self.path, "rb") as file:
            file.seek(state["position"])
            undone = [
                row for line in file.read().split(b"\n") if "group" in (row := parse_line(line))
            ]
        self._file.close()
        self._file = AppendedFile(self.path, _FILE, keep=state["position"])
        groups = Numbers()
        for row in undone:
            groups.add(row["group"])
        told = {
            "attempt": self.attempt,
            "after": state["cut"],
            "groups": groups.intervals,
            "rows": len(undone),
        }
        self._append([{"rolled_back": told}])

    def _append(self, lines: Iterable[Line]) -> None:
        text = "\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
        if text:
            self._file.write(text)

    def close(self) -> None:
        """Write the waiting rows if there is disk space now, and close the file."""
        self._file.close()


def balance(line: Line) -> list[str]:
    """Describe what is wrong in a ``cut`` line: each group that was supplied must be closed, ahead
    or open, once.
    """
    given = Numbers(line["given"])
    places = [("open", row["group"]) for row in line["open"]] + [
        ("ahead", row["group"]) for row in line["ahead"]
    ]
    problems = [
        f"group {number} is {where} but was never supplied"
        for where, number in places
        if number not in given
    ]
    closed = sum(line["counts"].values())
    asked, found = len(given) + line["repeats"], closed + len(places)
    if asked != found:
        what = f"{closed} closed, {len(line['ahead'])} ahead of training, {len(line['open'])} open"
        problems.append(f"{asked} groups were supplied, but {found} are recorded ({what})")
    if not line["repeats"]:
        twice = [
            number for number, times in Counter(number for _, number in places).items() if times > 1
        ]
        problems += [f"group {number} is in two places" for number in twice]
    return problems


def parse_line(line: bytes) -> Line:
    """Parse one line of the file. A line that is not a complete JSON object (the end of a killed
    run) gives {}.
    """
    try:
        value = parse_json(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _demand(truth: bool, what: str, numbers: Sequence[int]) -> None:
    if not truth:
        shown = ", ".join(map(str, numbers[:_SHOWN])) + (", ..." if len(numbers) > _SHOWN else "")
        raise LedgerError(f"the ledger is inconsistent: {what}: {shown}")
