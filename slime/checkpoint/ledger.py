"""The account of a run: what became of each group of prompts that was asked for. It closes at every checkpoint.

A group is *open* (under way, or back in the data source), *ahead* (in a rollout that no step has trained yet) or
*closed*: trained, filtered, replaced, left out, discarded or lost. Rows of closed groups go to
``outputs/<run>/ledger.jsonl`` when their rollout was trained; in memory are the others, and which numbers were ever
given, as intervals. At a checkpoint the account must close: what was asked is what is closed, ahead or open, each
once, and the open groups are those that pool and data source hold. The snapshot says how far the file is committed:
a resume cuts off what came after, and marks it as rolled back.

A full disk does not end a run: rows that cannot be written wait in memory until there is room again.

The file holds one JSON object per line: rows, ``{"cut": ...}`` per checkpoint and at the end,
``{"rolled_back": ...}`` per resume, and ``{"base": ...}`` where a run goes on in another folder.
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
from slime.data.sample import Group, flatten
from slime.data.staleness import step_of
from slime.observability.best_effort import AppendedFile, warn

CLOSED = ("trained", "filtered", "replaced", "left out", "discarded", "lost")
_FILE = "the ledger of the run"
_SHOWN = 8  # numbers named in an error


class LedgerError(AssertionError):
    """The account does not close: a group was lost, or used twice; the message names the groups."""


Line = dict[str, Any]
"""One JSON object of the file, or a row inside one: see the module. A snapshot holds that of the checkpoint, and which
rollout is ``complete``, the ``position`` in the file, and which numbers were given ``again``."""


@dataclass
class Row:
    """One group. ``versions`` are the weights that made its tokens, the oldest first."""

    group: int
    state: str
    asked: int  # rollout in which it was first given
    rollout: int | None = None  # that judged it; a trained group was trained in this step
    versions: list[str] = field(default_factory=list)
    samples: int = 0
    rewarded: int = 0  # samples with a reward
    tokens: int = 0  # response tokens
    returns: int = 0  # times it went back to the data source
    reason: str | None = None  # of a filter, or of whoever left it out
    again: int = 0  # a hook put a closed group back: its n-th time around

    def line(self) -> Line:
        """The row as the file holds it: values that are their field's default are left out."""
        defaults = {"rollout": None, "tokens": 0, "returns": 0, "reason": None, "again": 0}
        return {name: value for name, value in vars(self).items() if value != defaults.get(name, ...)}

    def take_in(self, group: Group) -> None:
        """What the samples say now."""
        leaves = flatten(group)
        made = {v for sample in leaves for v in [*sample.weight_versions, *(span[0] for span in sample.version_spans)]}
        self.versions = sorted(made, key=lambda version: (step_of(version) or 0, version))
        self.samples, self.tokens = len(leaves), sum(sample.response_length for sample in leaves)
        self.rewarded = sum(sample.reward is not None for sample in leaves)


@dataclass
class Cut:
    """The account at the end of a rollout's generation."""

    open: list[Line]
    given: list[list[int]]
    repeats: int = 0


def number_of(group: Group) -> int | None:
    """The group's number; None where the data source gives none."""
    return next((sample.group_index for sample in flatten(group) if sample.group_index is not None), None)


class Ledger:
    """Kept by the rollout manager; safe for its threads.

    Args:
        path: of the file.
        strict: every group comes from the built-in data source, through the built-in loops. Otherwise user code may
            take groups and put them back, and the account follows what it finds.
        keeps: the data source keeps the groups that are given back.
    """

    def __init__(self, path: Path, strict: bool = True, keeps: bool = True) -> None:
        self.path, self.strict, self.keeps = path, strict, keeps
        self.open: dict[int, Row] = {}
        self.given = Numbers()
        self.current: list[Row] = []  # judged since the last rollout was complete
        self.rollouts: dict[int, list[Row]] = {}  # complete, not yet trained
        self.next_rollout = 0  # the one that is being collected
        self.again: dict[int, int] = {}  # groups that user code put back after they were closed: how often
        self.cuts: dict[int, Cut] = {}
        self.counts: Counter[str] = Counter()  # of the rows in the file
        self.attempt = 0
        self.unnumbered = 0
        self.trained_to = -1
        self._lock = threading.RLock()
        self._last_cut: Line | None = None
        self._file = AppendedFile(path, _FILE)

    # --- what the loops say ------------------------------------------------------------------

    def __call__(self, event: str, group: Group, facts: Mapping[str, object]) -> None:
        """The observer of the rollout loops, see :data:`slime.rollout.state.Observer`.

        Raises:
            LedgerError: a group that is closed, or under way already, is given; or one is judged that is not open.
        """
        number = number_of(group)
        with self._lock:
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
            raise LedgerError(f"group {number} was given while it was under way: it would be used twice")
        row.state = "under way"
        row.take_in(group)

    def _enter(self, number: int) -> Row:
        again = 0
        if number in self.given:
            if self.strict:
                raise LedgerError(f"group {number} was given a second time: it is closed (see {self.path})")
            self.again[number] = again = self.again.get(number, 0) + 1
        self.given.add(number)
        row = self.open[number] = Row(number, "under way", self.next_rollout, again=again)
        return row

    def _judged(self, number: int, group: Group, verdict: str, reason: str | None = None) -> None:
        if number not in self.open and self.strict:
            raise LedgerError(f"group {number} was {verdict} in rollout {self.next_rollout} without being under way")
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
        """The buffer filter dropped these."""
        with self._lock:
            for group in groups:
                row = self.open.get(number) if (number := number_of(group)) is not None else None
                if row is not None:
                    self._close(row, "discarded", "the buffer filter dropped it")

    def _close(self, row: Row, state: str, reason: str | None) -> None:
        del self.open[row.group]
        row.state, row.reason, row.rollout = state, reason, self.next_rollout
        self.current.append(row)

    # --- what the manager says ---------------------------------------------------------------

    def complete(
        self, rollout_id: int, groups: Sequence[Group], held: Sequence[Group] | None, counter: int | None
    ) -> None:
        """A rollout is generated. The account is cut here: its state may be saved.

        Args:
            groups: its result.
            held: the open groups as pool and data source have them; None where they cannot say.
            counter: groups that the data source has numbered; None where it does not.

        Raises:
            LedgerError: strict, and something differs from what the loops said.
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
        result = {number: group for group in groups if (number := number_of(group)) is not None}
        extra = [number for number in result if number not in accepted]
        short = [number for number in accepted if number not in result]
        twice = len(groups) != len(result) and all(number_of(group) is not None for group in groups)
        if self.strict:
            _demand(not extra, f"rollout {rollout_id} hands over groups that were not accepted in it", extra)
            _demand(not short, f"rollout {rollout_id} accepted groups and does not hand them over", short)
            _demand(not twice, f"rollout {rollout_id} holds a group twice", sorted(result))
        for number in extra:  # from a rollout function that reports nothing
            self._judged(number, result[number], "accepted")
        for number in short:
            accepted[number].state, accepted[number].reason = "discarded", "not in the rollout's result"

    def _match_held(self, rollout_id: int, held: Sequence[Group]) -> None:
        found = {number: group for group in held if (number := number_of(group)) is not None}
        lost = [number for number in self.open if number not in found]
        strange = [number for number in found if number not in self.open]
        twice = len(held) != len(found) and all(number_of(group) is not None for group in held)
        if self.strict:
            _demand(not lost, f"after rollout {rollout_id} these groups are open and nobody has them", lost)
            _demand(not strange, f"after rollout {rollout_id} these groups are closed, yet kept to be used", strange)
            _demand(not twice, f"after rollout {rollout_id} a group is kept twice", sorted(found))
        for number in lost:
            self._close(self.open[number], "discarded", "neither in the result nor given back")
        for number in strange:
            self._enter(number).state = "returned"
        for number, row in self.open.items():
            row.take_in(found[number])

    def _match_counter(self, rollout_id: int, counter: int) -> None:
        missing = Numbers([[0, counter]] if counter else []).missing_in(self.given)
        if self.strict:
            _demand(not missing, f"after rollout {rollout_id} the data source has given groups unknown here", missing)
        for number in missing:
            self._close(self._enter(number), "discarded", "taken by user code")

    def left_out(self, rollout_id: int, trained: Iterable[int]) -> None:
        """Of a complete rollout, only ``trained`` groups fill whole steps."""
        kept = set(trained)
        with self._lock:
            for row in self.rollouts.get(rollout_id, []):
                if row.state == "accepted" and row.group not in kept:
                    row.state, row.reason = "left out", "the rollout fills no whole step with it"

    def trained(self, rollout_id: int) -> None:
        """All rollouts up to this one have trained: their rows go to the file."""
        with self._lock:
            for done in sorted(r for r in self.rollouts if r <= rollout_id):
                rows = self.rollouts.pop(done)
                for row in rows:
                    row.state = "trained" if row.state == "accepted" else row.state
                self.counts.update(row.state for row in rows)
                self._append(row.line() for row in rows)
            self.trained_to = max(self.trained_to, rollout_id)
            newest = max(self.cuts, default=-1)
            self.cuts = {r: cut for r, cut in self.cuts.items() if r >= rollout_id or r == newest}

    # --- checkpoints -------------------------------------------------------------------------

    def cut(self, trained: int, complete: int) -> Line:
        """The committed account: rollouts up to ``trained`` have trained, those up to ``complete`` are generated.

        Written to the file, and returned for the snapshot.

        Raises:
            LedgerError: it does not close.
        """
        with self._lock:
            self.trained(trained)
            if complete not in self.cuts and complete >= 0:
                raise LedgerError(f"the ledger has no account of rollout {complete}, only of {sorted(self.cuts)}")
            at = self.cuts.get(complete, Cut([], []))
            ahead = [r.line() for n in sorted(self.rollouts) if n <= complete for r in self.rollouts[n]]
            line = {"cut": trained, "attempt": self.attempt, "counts": dict(self.counts), "ahead": ahead, **vars(at)}
            line["unnumbered"] = self.unnumbered
            problems = balance(line)
            if problems:
                raise LedgerError(f"the ledger does not close after rollout {trained}: {'; '.join(problems)}")
            if line != self._last_cut:
                self._append([line])
                self._last_cut = line
            return {**line, "complete": complete, "position": self._file.end, "again": dict(self.again)}

    def restore(self, state: Line, attempt: int) -> None:
        """Go on from a snapshot's account; what the file says beyond it is rolled back."""
        with self._lock:
            self.attempt = attempt
            self.counts = Counter(state["counts"])
            self.given = Numbers(state["given"])
            self.again = dict(state.get("again") or {})
            self.unnumbered = state.get("unnumbered", 0)
            self.open = {row["group"]: Row(**row) for row in state["open"]}
            for row in self.open.values():
                row.state = "returned"  # the data source gives them again
            self.trained_to = state["cut"]
            for line in state["ahead"]:
                self.rollouts.setdefault(line["rollout"], []).append(Row(**line))
            self.next_rollout = state["complete"] + 1
            self.cuts = {state["complete"]: self._cut_now()}
            if self._file.end >= state["position"]:
                self._roll_back(state)
                return
            if self._file.end:  # rows waited for room on the disk when the run was killed, or the machine lost power
                lost = self.path.with_name(f"{self.path.stem}.lost{self.path.suffix}")
                self.path.replace(lost)
                self._file = AppendedFile(self.path, _FILE)
                warn(
                    f"{self.path} had fewer rows than the snapshot speaks of: it was moved to {lost.name}, and the "
                    "ledger goes on with the sums of the snapshot"
                )
            closed = Numbers(state["given"])
            for line in [*state["open"], *state["ahead"]]:
                closed.remove(line["group"])
            self._append([{"base": {"counts": dict(self.counts), "closed": closed.intervals}}])

    def _roll_back(self, state: Line) -> None:
        with open(self.path, "rb") as file:
            file.seek(state["position"])
            undone = [row for line in file.read().split(b"\n") if "group" in (row := parse_line(line))]
        self._file.close()
        self._file = AppendedFile(self.path, _FILE, keep=state["position"])
        groups = Numbers()
        for row in undone:
            groups.add(row["group"])
        told = {"attempt": self.attempt, "after": state["cut"], "groups": groups.intervals, "rows": len(undone)}
        self._append([{"rolled_back": told}])

    def _append(self, lines: Iterable[Line]) -> None:
        text = "\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
        if text:
            self._file.write(text)

    def close(self) -> None:
        """Write rows that wait, if there is room by now."""
        self._file.close()


def balance(line: Line) -> list[str]:
    """What is wrong with a cut's sums: each number that was given is closed, ahead or open, once."""
    given = Numbers(line["given"])
    places = [("open", row["group"]) for row in line["open"]] + [("ahead", row["group"]) for row in line["ahead"]]
    problems = [f"group {number} is {where} but was never given" for where, number in places if number not in given]
    closed = sum(line["counts"].values())
    asked, found = len(given) + line["repeats"], closed + len(places)
    if asked != found:
        what = f"{closed} closed, {len(line['ahead'])} ahead of training, {len(line['open'])} open"
        problems.append(f"{asked} groups were asked for, but {found} are accounted for ({what})")
    if not line["repeats"]:
        twice = [number for number, times in Counter(number for _, number in places).items() if times > 1]
        problems += [f"group {number} is in two places" for number in twice]
    return problems


def parse_line(line: bytes) -> Line:
    """One line of the file; empty for what is not a whole JSON object (the tail of a killed run)."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _demand(truth: bool, what: str, numbers: Sequence[int]) -> None:
    if not truth:
        shown = ", ".join(map(str, numbers[:_SHOWN])) + (", ..." if len(numbers) > _SHOWN else "")
        raise LedgerError(f"the ledger does not close: {what}: {shown}")
