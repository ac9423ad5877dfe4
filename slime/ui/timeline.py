"""The trace of a step as the page draws it: the driver's phases, the samples of each group, and who waited for whom."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from slime.observability.trace_file import DRIVER, read_trace, trace_of

MOST_SPANS = 6000
"""With more spans of samples, only those groups are drawn that ended last."""
GROUP = "generate_and_rm_group"
WRAPPERS = frozenset({"generate_and_rm", GROUP})
_POINTS = 240
_SHORT = 0.01  # seconds; shorter waits are not worth a sentence
Span = tuple[str, float, float]
"""Name, start and end; in seconds since the first event of the step."""


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
        events = read_trace(trace_of(folder, step))
    except (OSError, EOFError, ValueError, KeyError, gzip.BadGzipFile, zlib.error, json.JSONDecodeError):
        return None
    complete = [event for event in events if event.get("ph") == "X"]
    if not complete:
        return None
    start = min(event["ts"] for event in complete)
    phases: list[Span] = []
    lanes: dict[tuple[int, int], Lane] = {}
    for event in complete:
        begin = (event["ts"] - start) / 1e6
        span = (str(event["name"]), begin, begin + event["dur"] / 1e6)
        if event["pid"] == DRIVER:
            phases.append(span)
        else:
            lane = lanes.setdefault((event["pid"], event["tid"]), Lane(event["pid"] - 1, event["tid"]))
            lane.spans.append(span)
    for lane in lanes.values():
        own = [s for s in lane.spans if s[0] != GROUP] or lane.spans  # a group ends with its last sample
        lane.whole = min(s[1] for s in own), max(s[2] for s in own)
        lane.spans = [s for s in lane.spans if s[0] not in WRAPPERS] or lane.spans
    samples = list(lanes.values())
    shown = _last_groups(samples)
    end = max((event["ts"] + event["dur"] - start) / 1e6 for event in complete)
    return {
        "step": step,
        "seconds": round(end, 4),
        "phases": [_rounded(span) for span in sorted(phases, key=lambda span: (span[1], -span[2]))],
        "groups": _groups(shown),
        "hidden": len({lane.group for lane in samples}) - len({lane.group for lane in shown}),
        "active": _active(samples, end),
        "notes": _notes(phases, samples),
    }


def _rounded(span: Span) -> list[object]:
    return [span[0], round(span[1], 4), round(span[2], 4)]


def _last_groups(samples: Sequence[Lane]) -> list[Lane]:
    """Return the lanes of those groups that ended last, with at most :data:`MOST_SPANS` spans."""
    ends: dict[int, float] = {}
    counts: dict[int, int] = {}
    for lane in samples:
        ends[lane.group] = max(ends.get(lane.group, 0.0), lane.whole[1])
        counts[lane.group] = counts.get(lane.group, 0) + len(lane.spans)
    kept: set[int] = set()
    spans = 0
    for group in sorted(ends, key=lambda group: -ends[group]):
        spans += counts[group]
        if kept and spans > MOST_SPANS:
            break
        kept.add(group)
    return [lane for lane in samples if lane.group in kept]


def _groups(samples: Sequence[Lane]) -> list[dict[str, object]]:
    groups: dict[int, list[Lane]] = {}
    for lane in samples:
        groups.setdefault(lane.group, []).append(lane)
    return [
        {
            "group": group,
            "start": round(min(lane.whole[0] for lane in lanes), 4),
            "end": round(max(lane.whole[1] for lane in lanes), 4),
            "samples": [{"sample": lane.sample, "spans": [_rounded(s) for s in lane.spans]} for lane in lanes],
        }
        for group, lanes in sorted(groups.items(), key=lambda entry: min(lane.whole[0] for lane in entry[1]))
    ]


def _active(samples: Sequence[Lane], end: float) -> list[int]:
    """Return how many samples were in work at evenly spaced moments from 0 to ``end``."""
    changes = [0] * (_POINTS + 1)
    scale = _POINTS / end if end else 0.0
    for lane in samples:
        changes[min(int(lane.whole[0] * scale), _POINTS - 1)] += 1
        changes[min(int(lane.whole[1] * scale) + 1, _POINTS)] -= 1
    counts, now = [], 0
    for change in changes[:-1]:
        now += change
        counts.append(now)
    return counts


def _notes(phases: Sequence[Span], samples: Sequence[Lane]) -> list[str]:
    """Say who waited for whom, as sentences."""
    notes = []
    if samples:
        ends = sorted(lane.whole[1] for lane in samples)
        last = max(samples, key=lambda lane: lane.whole[1])
        half = median(ends)
        notes.append(
            f"Half of the {len(samples)} samples were ready after {half:.2f} s. The last one, sample {last.sample} of "
            f"group {last.group}, came {ends[-1] - half:.2f} s later."
        )
        notes += _share_of_calls(samples)
    if phases:
        notes += _waits(phases, samples)
    return notes


def _share_of_calls(samples: Sequence[Lane]) -> list[str]:
    """Say what the samples spent their time in, if it was not generation alone."""
    seconds: dict[str, float] = {}
    for lane in samples:
        for name, begin, end in lane.spans:
            seconds[name] = seconds.get(name, 0.0) + end - begin
    total = sum(seconds.values())
    parts = [
        f"{name} {100 * took / total:.0f}%" for name, took in sorted(seconds.items(), key=lambda e: -e[1]) if total
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
                    f"The driver waited {took} in {name}, {waited:.2f} s of it while samples of this step ran."
                )
    trained = [(begin, end) for name, begin, end in phases if name == "train"]
    if len(trained) == 1:  # in an asynchronous run the file has several, and samples of later steps run meanwhile
        begin, end = trained[0]
        idle = end - min(max(begin, last), end)
        notes.append(f"Training took {end - begin:.2f} s; for {idle:.2f} s of it no sample of this step ran.")
    return notes
