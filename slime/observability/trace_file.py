"""Traces of a rollout and phases of the driver as one Chrome/Perfetto JSON file (open in ui.perfetto.dev)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from slime.observability.best_effort import best_effort, replacing
from slime.observability.samples import remove_older
from slime.observability.timers import Span
from slime.observability.trace_utils import Attrs, Event, Trace, trace_on

DRIVER = 0  # process id of the driver's row in the viewer; prompt groups follow it
MOST_EVENTS = 100_000  # in one file, of samples: some 20 MB before they are compressed, which the viewer takes
_MOST_OPEN = 64
ViewerEvent = dict[str, object]
"""An event in the form of Chrome's viewer, in which times are microseconds."""
_LEVEL = 1  # of gzip: a twentieth of the size


def trace_of(run_dir: Path, rollout_id: int) -> Path:
    """Where the trace of a rollout is: JSON compressed with gzip, which ui.perfetto.dev opens as it is."""
    return Path(run_dir) / "traces" / f"rollout_{rollout_id:06d}.json.gz"


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


class TraceFiles:
    """Writes the traces of a run's rollouts; belongs to the rollout manager.

    A file is written with the samples as soon as they are there, and once more when the phases of the driver come. In
    between the events of the samples are kept as text, so no file is read.

    Args:
        last: files that stay; older ones are removed. None: all.
        most_events: of samples in one file. Where there are more, groups at even distances are left out.
    """

    def __init__(self, run_dir: Path, last: int | None = None, most_events: int = MOST_EVENTS) -> None:
        self.run_dir, self.last, self.most_events = Path(run_dir), last, most_events
        # Until the driver reports its phases: the wall time of the first event, and the events as JSON text.
        self._open: dict[int, tuple[float, str]] = {}

    def write_samples(self, rollout_id: int, samples: Sequence[object]) -> Path | None:
        """Write a process row per prompt group and a thread row per sample.

        Args:
            samples: flat; those without a trace are left out.

        Returns:
            The file, or None when there was nothing to write.
        """
        traces = _within(_traces(samples), self.most_events)
        if not traces:
            return None
        start = min(event["ts"] for _, trace in traces for event in trace["events"])
        events = _joined(event for position, trace in traces for event in _sample_events(trace, position))
        self._open[rollout_id] = start, events
        for old in list(self._open)[:-_MOST_OPEN]:  # the driver never came back to them
            del self._open[old]
        return self._write(rollout_id, events)

    def add_phases(self, rollout_id: int, phases: Sequence[Span]) -> None:
        """Add the driver's row to the trace of a rollout that is trained by now: those phases that are not over before
        its first event. So the file of a rollout that was generated ahead shows what trained meanwhile.

        Args:
            phases: ``{"name", "start", "end"}`` in wall seconds, e.g. of :class:`~slime.observability.timers.Timers`.
        """
        begun = self._open.pop(rollout_id, None)
        row = list(_phase_events([phase for phase in phases if begun and phase["end"] >= begun[0]]))
        if begun and row:
            self._write(rollout_id, f"{begun[1]},\n{_joined(row)}")

    def _write(self, rollout_id: int, events: str) -> Path:
        path = trace_of(self.run_dir, rollout_id)
        text = f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n'
        with best_effort("traces"):
            with replacing(path) as temporary:
                temporary.write_bytes(gzip.compress(text.encode(), _LEVEL))
            if self.last is not None:
                remove_older(path, self.last)
        return path


def _joined(events: Iterable[ViewerEvent]) -> str:
    return ",\n".join(json.dumps(event, default=str) for event in events)


def _traces(samples: Iterable[object]) -> list[tuple[int, Trace]]:
    """Traces that hold an event, with the positions of their samples."""
    traces = ((position, trace_on(sample)) for position, sample in enumerate(samples))
    return [(position, trace) for position, trace in traces if trace is not None and trace.get("events")]


def _within(traces: list[tuple[int, Trace]], most: int) -> list[tuple[int, Trace]]:
    """Those of whole groups at even distances, with about ``most`` events or less; at least one group's."""
    events = sum(len(trace["events"]) for _, trace in traces)
    if events <= most:
        return traces
    groups: dict[object, list[tuple[int, Trace]]] = {}
    for position, trace in traces:
        group = trace.get("group_id")
        groups.setdefault(("alone", position) if group is None else group, []).append((position, trace))
    share = list(groups.values())[:: -(-events // most)]
    return [entry for group in share for entry in group]


def _phase_events(phases: Sequence[Span]) -> Iterable[ViewerEvent]:
    if phases:
        yield _named("process_name", DRIVER, 0, "driver")
    for phase in phases:
        yield _complete(phase["name"], phase["start"], phase["end"], DRIVER, 0, {})


def _sample_events(trace: Trace, position: int) -> Iterable[ViewerEvent]:
    group, sample = trace.get("group_id"), trace.get("sample_id")
    pid = 1 + (group if group is not None else position)
    tid = sample if sample is not None else position
    yield _named("process_name", pid, 0, f"group {group}")
    yield _named("thread_name", pid, tid, f"sample {sample}")
    open_spans: dict[str, Event] = {}
    last = max(event["ts"] for event in trace["events"])
    for event in trace["events"]:
        if event["type"] == "span_start":
            open_spans[event["span_id"]] = event
        elif event["type"] == "span_end" and event["span_id"] in open_spans:
            start = open_spans.pop(event["span_id"])
            attrs = {**start.get("attrs", {}), **event.get("attrs", {}), "attempt": start["attempt"]}
            yield _complete(start["name"], start["ts"], event["ts"], pid, tid, attrs)
        elif event["type"] == "event":
            attrs = {**event.get("attrs", {}), "attempt": event["attempt"]}
            moment: ViewerEvent = {"ph": "i", "s": "t", "name": event["name"], "ts": event["ts"] * 1e6}
            yield {**moment, "pid": pid, "tid": tid, "args": attrs}
    for start in open_spans.values():  # aborted in the middle
        attrs = {**start.get("attrs", {}), "attempt": start["attempt"], "unfinished": True}
        yield _complete(start["name"], start["ts"], last, pid, tid, attrs)


def _complete(name: str, start: float, end: float, pid: int, tid: int, attrs: Attrs) -> ViewerEvent:
    duration = max(end - start, 0.0) * 1e6  # the format counts microseconds
    return {"ph": "X", "name": name, "ts": start * 1e6, "dur": duration, "pid": pid, "tid": tid, "args": attrs}


def _named(kind: str, pid: int, tid: int, name: str) -> ViewerEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
