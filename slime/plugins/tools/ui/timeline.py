"""The trace of a step as the page draws it: what driver, training ranks and engines did, the
samples of each group, and who waited for whom."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from slime.observability.trace_file import DRIVER, trace_of

from ..summary import read_trace

MOST_SPANS = 6000
"""With more spans of samples, only those groups are drawn that ended last."""
GROUP = "generate_and_rm_group"
WRAPPERS = frozenset({"generate_and_rm", GROUP})
MOST_PROCESSES = 64
"""At most so many training ranks, and so many engines, are drawn, at even distances."""
_POINTS = 240
_SHORT = 0.01  # seconds; shorter waits are not worth a sentence
Span = tuple[str, float, float]
"""Name, start and end; in seconds since the first event of the step."""
LoadAt = tuple[float, int, int]
"""A moment in seconds since the first event of the step, and an engine's running and waiting
requests.
"""
T = TypeVar("T")


@dataclass
class Lane:
    """The spans of one sample.

    Attributes:
        spans: Calls of engines, verifiers and tools.
        whole: From the start of the sample to its end.
    """

    group: int
    sample: int
    spans: list[Span] = field(default_factory=list)
    whole: tuple[float, float] = (0.0, 0.0)


def timeline(folder: Path, step: int) -> dict[str, object] | None:
    """Return the time line of a step; None if the run has no readable trace of it."""
    try:
        return _drawn(step, read_trace(trace_of(folder, step)))
    # A trace may be damaged, or written by another program.
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
            zlib.error):  # fmt: skip
        return None


def _drawn(step: int, events: Sequence[Mapping[str, Any]]) -> dict[str, object] | None:
    complete = [event for event in events if event.get("ph") == "X"]
    if not complete:
        return None
    start = min(event["ts"] for event in complete)
    end = max(event["ts"] + event["dur"] - start for event in complete) / 1e6
    # Divide the events among the driver, the training ranks and the lanes of samples.
    phases: list[Span] = []
    ranks: dict[str, list[Span]] = {}
    names = {
        e["tid"]: str(e["args"]["name"])
        for e in events
        if e["pid"] == DRIVER and e["name"] == "thread_name"
    }
    lanes: dict[tuple[int, int], Lane] = {}
    for event in complete:
        process = int(event["pid"])
        thread = int(event["tid"])
        begin = (event["ts"] - start) / 1e6
        span = (str(event["name"]), begin, begin + event["dur"] / 1e6)
        if process != DRIVER:
            lanes.setdefault((process, thread), Lane(process - 1, thread)).spans.append(span)
        elif thread:
            ranks.setdefault(names.get(thread, f"process {thread}"), []).append(span)
        else:
            phases.append(span)
    # Calls that only wrap others say when a sample began and ended, and are not drawn.
    for lane in lanes.values():
        # a group ends with its last sample
        own = [s for s in lane.spans if s[0] != GROUP] or lane.spans
        lane.whole = min(s[1] for s in own), max(s[2] for s in own)
        lane.spans = [s for s in lane.spans if s[0] not in WRAPPERS] or lane.spans
    # A long step is drawn in part; the sentences are about all of it.
    samples = list(lanes.values())
    groups = _groups(samples)
    shown = _last_groups(groups)
    engines = _engines(events, start)
    return {
        "step": step,
        "seconds": round(end, 4),
        "phases": [_rounded(span) for span in sorted(phases, key=lambda span: (span[1], -span[2]))],
        "processes": [_process(name, spans, end) for name, spans in _some(ranks).items()],
        "engines": [_engine(name, loads, end) for name, loads in _some(engines).items()],
        "more": max(len(ranks), len(engines)) - MOST_PROCESSES,
        "groups": shown,
        "hidden": len(groups) - len(shown),
        "active": _active(samples, end),
        "notes": [
            *_notes(phases, samples),
            *_idle_ranks(ranks, phases, end),
            *_idle_engines(engines),
        ],
    }


def _engines(events: Sequence[Mapping[str, Any]], start: float) -> dict[str, list[LoadAt]]:
    by_engine: dict[str, list[LoadAt]] = {}
    for event in events:
        if event.get("ph") == "C":
            counts = event["args"]
            load = ((event["ts"] - start) / 1e6, int(counts["running"]), int(counts["waiting"]))
            by_engine.setdefault(str(event["name"]), []).append(load)
    return dict(sorted(by_engine.items(), key=lambda entry: (len(entry[0]), entry[0])))


def _some(processes: Mapping[str, T]) -> dict[str, T]:
    names = list(processes)
    return {name: processes[name] for name in names[:: max(-(-len(names) // MOST_PROCESSES), 1)]}


def _process(name: str, spans: Sequence[Span], end: float) -> dict[str, object]:
    """A training rank: what it did, and the fraction of the time line in which it did anything."""
    busy = sum(stop - begin for begin, stop in _union(spans, end))
    return {
        "name": name,
        "busy": round(busy / end, 4) if end else 0.0,
        "spans": [_rounded(span) for span in spans],
    }


def _engine(name: str, loads: Sequence[LoadAt], end: float) -> dict[str, object]:
    """An engine: its requests over time, and the fraction of the moments at which it ran any."""
    inside = [running > 0 for moment, running, _ in loads if 0 <= moment <= end]
    points = [[round(moment, 3), running, waiting] for moment, running, waiting in loads]
    return {
        "name": name,
        "busy": round(sum(inside) / len(inside), 4) if inside else 0.0,
        "loads": points,
    }


def _union(spans: Sequence[Span], end: float) -> list[tuple[float, float]]:
    """Return the times from 0 to ``end`` that any of the spans covers, without overlaps."""
    joined: list[tuple[float, float]] = []
    for begin, stop in sorted((max(span[1], 0.0), min(span[2], end)) for span in spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        elif stop > begin:
            joined.append((begin, stop))
    return joined


def _idle_ranks(
    ranks: Mapping[str, Sequence[Span]], phases: Sequence[Span], end: float
) -> list[str]:
    """Say for what the training ranks waited, and which of them was the last."""
    if not ranks or not end:
        return []
    # Each gap between the spans of a rank belongs to the phases of the driver that it overlaps.
    idle: dict[str, float] = {}
    rest = total = 0.0
    for spans in ranks.values():
        edges = [0.0, *(edge for part in _union(spans, end) for edge in part), end]
        for begin, stop in zip(edges[::2], edges[1::2], strict=True):
            total += stop - begin
            left = stop - begin
            for name, start, over in phases:
                shared = min(over, stop) - max(start, begin)
                if shared > 0:
                    idle[name] = idle.get(name, 0.0) + shared
                    left -= shared
            rest += max(left, 0.0)
    shown = [
        (name, seconds / len(ranks))
        for name, seconds in sorted(idle.items(), key=lambda entry: -entry[1])
    ]
    during = [f"{seconds:.2f} s in {name}" for name, seconds in shown if seconds >= _SHORT][:4]
    between = (
        [f"{rest / len(ranks):.2f} s between phases of the driver"]
        if rest / len(ranks) >= _SHORT
        else []
    )
    notes = []
    if during or between:
        notes.append(
            f"Of {end:.2f} s, a training rank worked {end - total / len(ranks):.2f} s and waited "
            f"{total / len(ranks):.2f} s: {', '.join([*during, *between])}."
        )
    return notes + _last_rank(ranks)


def _last_rank(ranks: Mapping[str, Sequence[Span]]) -> list[str]:
    """Name the rank for which the others waited longest at the beginning of a phase."""
    widest = _SHORT
    note = ""
    for name in dict.fromkeys(span[0] for spans in ranks.values() for span in spans):
        begins = {
            rank: next((s[1] for s in spans if s[0] == name), None) for rank, spans in ranks.items()
        }
        known = {rank: begin for rank, begin in begins.items() if begin is not None}
        first = min(known, key=lambda rank: known[rank])
        last = max(known, key=lambda rank: known[rank])
        if known[last] - known[first] > widest:
            widest = known[last] - known[first]
            note = f"{last} was the last to begin {name}, {widest:.2f} s after {first}."
    return [note] if note else []


def _idle_engines(engines: Mapping[str, Sequence[LoadAt]]) -> list[str]:
    """Say how long single engines ran requests while others had none, or that one never had any."""
    if len(engines) < 2:
        return []
    # An engine without requests while another still runs some had too little to do.
    ends = {
        name: max((m for m, running, _ in loads if running), default=0.0)
        for name, loads in engines.items()
    }
    first = min(ends, key=lambda name: ends[name])
    last = max(ends, key=lambda name: ends[name])
    if ends[last] - ends[first] < _SHORT:
        return []
    if not any(running for _, running, _ in engines[first]):
        return [f"{first} ran no request; {last} ran its last one after {ends[last]:.1f} s."]
    return [f"{first} ran its last request {ends[last] - ends[first]:.1f} s before {last}."]


def _rounded(span: Span) -> list[object]:
    return [span[0], round(span[1], 4), round(span[2], 4)]


def _groups(samples: Sequence[Lane]) -> list[dict[str, Any]]:
    """Return the groups with their samples, those that ended last first."""
    groups: dict[int, list[Lane]] = {}
    for lane in samples:
        groups.setdefault(lane.group, []).append(lane)
    drawn = [
        {
            "group": group,
            "start": round(min(lane.whole[0] for lane in lanes), 4),
            "end": round(max(lane.whole[1] for lane in lanes), 4),
            "samples": [
                {"sample": lane.sample, "spans": [_rounded(s) for s in lane.spans]}
                for lane in lanes
            ],
        }
        for group, lanes in groups.items()
    ]
    return sorted(drawn, key=lambda group: -group["end"])


def _last_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first of the groups with at most :data:`MOST_SPANS` spans, by the time at which
    they began.
    """
    ends = accumulate(sum(len(sample["spans"]) for sample in group["samples"]) for group in groups)
    shown = [
        group for group, spans in zip(groups, ends, strict=True) if spans <= MOST_SPANS
    ] or list(groups[:1])
    return sorted(shown, key=lambda group: group["start"])


def _active(samples: Sequence[Lane], end: float) -> list[int]:
    """Return how many samples were in work at evenly spaced moments from 0 to ``end``."""
    # Beginnings and ends in steps of time; their running sum is the number in work.
    changes = [0] * (_POINTS + 1)
    scale = _POINTS / end if end else 0.0
    for lane in samples:
        changes[min(int(lane.whole[0] * scale), _POINTS - 1)] += 1
        changes[min(int(lane.whole[1] * scale) + 1, _POINTS)] -= 1
    return list(accumulate(changes[:-1]))


def _notes(phases: Sequence[Span], samples: Sequence[Lane]) -> list[str]:
    """Say who waited for whom, as sentences."""
    notes = []
    if samples:
        ends = sorted(lane.whole[1] for lane in samples)
        last = max(samples, key=lambda lane: lane.whole[1])
        half = median(ends)
        notes.append(
            f"Half of the {len(samples)} samples were ready after {half:.2f} s. The last one, "
            f"sample {last.sample} of group {last.group}, came {ends[-1] - half:.2f} s later."
        )
        notes += _share_of_calls(samples)
    if phases:
        notes += _waits(phases, samples)
    return notes


def _share_of_calls(samples: Sequence[Lane]) -> list[str]:
    """Say what the samples spent their time in, if it was not generation alone."""
    # Time in calls other than generation: verifiers, tools.
    seconds: dict[str, float] = {}
    for lane in samples:
        for name, begin, end in lane.spans:
            seconds[name] = seconds.get(name, 0.0) + end - begin
    total = sum(seconds.values())
    parts = [
        f"{name} {100 * took / total:.0f}%"
        for name, took in sorted(seconds.items(), key=lambda e: -e[1])
        if total
    ]
    return [f"The samples' time by call: {', '.join(parts)}."] if len(parts) > 1 else []


def _waits(phases: Sequence[Span], samples: Sequence[Lane]) -> list[str]:
    if not samples:
        return []
    notes = []
    first = min(lane.whole[0] for lane in samples)
    last = max(lane.whole[1] for lane in samples)
    for name, begin, end in phases:
        if name in ("rollout", "drain"):
            waited = max(min(end, last) - max(begin, first), 0.0)
            if end - begin >= _SHORT:
                took = f"{end - begin:.2f} s"
                notes.append(
                    f"The driver waited {took} in {name}, {waited:.2f} s of it while samples of "
                    "this step ran."
                )
    trained = [(begin, end) for name, begin, end in phases if name == "train"]
    # in an asynchronous run the file has several, and samples of later steps run meanwhile
    if len(trained) == 1:
        begin, end = trained[0]
        idle = end - min(max(begin, last), end)
        notes.append(
            f"Training took {end - begin:.2f} s; for {idle:.2f} s of it no sample of this step ran."
        )
    return notes
