"""Write the traces of a rollout and the phases of the driver as one file for Chrome or Perfetto
(ui.perfetto.dev).
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypedDict

from slime.observability.files import best_effort, replacing
from slime.observability.progress import Span
from slime.observability.samples import remove_older
from slime.observability.trace_utils import Attrs, Event, Trace, trace_on

DRIVER = 0  # process id of the driver in the viewer; prompt groups have the next ones
# of samples in one file: about 20 MB before compression, which the viewer can still open
MOST_EVENTS = 100_000
MOST_LOADS = 20_000
MOST_OPEN = 64
ViewerEvent = dict[str, object]
"""An event in the format of Chrome's trace viewer, in which times are in microseconds."""


class Load(TypedDict):
    """The load of an engine at a wall time: its running and waiting requests, and the tokens in its
    KV cache.

    They are None if it did not answer (``state`` is ``silent``), was not asked (``paused``) or is
    not there.
    """

    time: float
    engine: int
    state: str
    running: int | None
    waiting: int | None
    tokens: int | None


_LEVEL = 1  # gzip level; even the fastest one reduces the size to a twentieth


def trace_of(run_dir: Path, rollout_id: int) -> Path:
    """Return the path of a rollout's trace: JSON that is compressed with gzip, which
    ui.perfetto.dev opens directly.
    """
    return Path(run_dir) / "traces" / f"rollout_{rollout_id:06d}.json.gz"


class TraceFiles:
    """Writes the trace files of a run; the rollout manager has one.

    A file is written as soon as the samples of a rollout are complete, and again when the driver
    reports its phases. In between, the events of the samples are kept as text, so that the file
    need not be read again.

    Args:
        last: Number of files to keep; older ones are deleted. None: all.
        most_events: Maximum number of events of samples in one file. If there are more, only groups
            at even distances are written.
    """

    def __init__(
        self, run_dir: Path, last: int | None = None, most_events: int = MOST_EVENTS
    ) -> None:
        self.run_dir = Path(run_dir)
        self.last = last
        self.most_events = most_events
        # Rollouts whose phases the driver has not reported yet: wall time of the first event, and
        # the events as JSON.
        self.unfinished: dict[int, tuple[float, str]] = {}

    def write_samples(self, rollout_id: int, samples: Sequence[object]) -> Path | None:
        """Write the traces of samples: each prompt group is shown as a process, and each sample as
        a thread of it.

        Args:
            samples: A flat sequence; samples without a trace are left out.

        Returns:
            The path of the file, or None if there are no events.
        """
        # A viewer cannot open millions of events, so of a large rollout only some groups are
        # written.
        traces = within(traces_of(samples), self.most_events)
        if not traces:
            return None
        start = min(event["ts"] for _, trace in traces for event in trace["events"])
        events = _joined(
            event for position, trace in traces for event in _sample_events(trace, position)
        )
        self.unfinished[rollout_id] = start, events
        # the driver has not reported phases for these and never will
        for old in list(self.unfinished)[:-MOST_OPEN]:
            del self.unfinished[old]
        return self._write(rollout_id, events)

    def add_phases(
        self,
        rollout_id: int,
        phases: Sequence[Span],
        loads_between: Callable[[float, float], Sequence[Load]] | None = None,
    ) -> None:
        """Add the phases of the driver and of the training ranks, and the load of the engines, to
        the trace of a rollout that has been trained.

        Only phases that end after the rollout's first event are added. So the file of a rollout
        that was generated ahead also shows the training that ran at the same time.

        Args:
            phases: Completed phases, for example of :class:`~slime.observability.progress.Timers`.
            loads_between: Returns the load of the engines between two wall times.
        """
        # A resumed run reports phases of rollouts whose samples it has not seen; there is nothing
        # to add these to.
        begun = self.unfinished.pop(rollout_id, None)
        mine = [phase for phase in phases if begun and phase["end"] >= begun[0]]
        row = list(phase_events(mine))
        if begun and mine and loads_between is not None:
            loads = loads_between(
                min(begun[0], *(phase["start"] for phase in mine)), max(p["end"] for p in mine)
            )
            row += load_events(loads)
        if begun and row:
            self._write(rollout_id, f"{begun[1]},\n{_joined(row)}")

    def _write(self, rollout_id: int, events: str) -> Path:
        # The events are already text, so that the file is written without encoding them again.
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


def traces_of(samples: Iterable[object]) -> list[tuple[int, Trace]]:
    """Return the traces that have events, with the positions of their samples."""
    traces = ((position, trace_on(sample)) for position, sample in enumerate(samples))
    return [
        (position, trace) for position, trace in traces if trace is not None and trace.get("events")
    ]


def within(traces: list[tuple[int, Trace]], most: int) -> list[tuple[int, Trace]]:
    """Select whole groups at even distances with about ``most`` events or fewer, but at least one
    group.
    """
    events = sum(len(trace["events"]) for _, trace in traces)
    if events <= most:
        return traces
    groups: dict[object, list[tuple[int, Trace]]] = {}
    for position, trace in traces:
        group = trace.get("group_id")
        groups.setdefault(("alone", position) if group is None else group, []).append(
            (position, trace)
        )
    # Whole groups: half of the samples of a group would look as if the others had been fast.
    share = list(groups.values())[:: -(-events // most)]
    return [entry for group in share for entry in group]


def phase_events(phases: Sequence[Span]) -> Iterable[ViewerEvent]:
    """Yield the driver as a process of the viewer, with a thread for itself and for each training
    rank.
    """
    if phases:
        yield _named("process_name", DRIVER, 0, "driver")
    # The driver's own phases are thread 0; each training rank gets a thread when its first phase
    # comes.
    threads: dict[str | None, int] = {None: 0}
    for phase in phases:
        process = phase.get("process")
        if process is not None and process not in threads:
            threads[process] = len(threads)
            yield _named("thread_name", DRIVER, threads[process], process)
        yield _complete(phase["name"], phase["start"], phase["end"], DRIVER, threads[process], {})


def load_events(loads: Sequence[Load]) -> Iterable[ViewerEvent]:
    """Yield the engines' loads as counters; of many, the same share of each engine. An engine
    without numbers has 0 requests."""
    # Each engine keeps the same share of its loads, so that none looks idle.
    every = max(-(-len(loads) // MOST_LOADS), 1)
    seen = Counter[int]()
    for load in loads:
        seen[load["engine"]] += 1
        if (seen[load["engine"]] - 1) % every:
            continue
        counts = {"running": load["running"] or 0, "waiting": load["waiting"] or 0}
        name = f"engine {load['engine']}"
        yield {
            "ph": "C",
            "name": name,
            "ts": load["time"] * 1e6,
            "pid": DRIVER,
            "tid": 0,
            "args": counts,
        }


def _sample_events(trace: Trace, position: int) -> Iterable[ViewerEvent]:
    # Samples that a hook made may have no numbers; then their position keeps them apart.
    group = trace.get("group_id")
    sample = trace.get("sample_id")
    pid = 1 + (group if group is not None else position)
    tid = sample if sample is not None else position
    yield _named("process_name", pid, 0, f"group {group}")
    yield _named("thread_name", pid, tid, f"sample {sample}")
    # Events are in the order of time, so that a span's start comes before its end.
    open_spans: dict[str, Event] = {}
    last = max(event["ts"] for event in trace["events"])
    for event in trace["events"]:
        if event["type"] == "span_start":
            open_spans[event["span_id"]] = event
        elif event["type"] == "span_end" and event["span_id"] in open_spans:
            start = open_spans.pop(event["span_id"])
            attrs = {
                **start.get("attrs", {}),
                **event.get("attrs", {}),
                "attempt": start["attempt"],
            }
            yield _complete(start["name"], start["ts"], event["ts"], pid, tid, attrs)
        elif event["type"] == "event":
            attrs = {**event.get("attrs", {}), "attempt": event["attempt"]}
            moment: ViewerEvent = {
                "ph": "i",
                "s": "t",
                "name": event["name"],
                "ts": event["ts"] * 1e6,
            }
            yield {**moment, "pid": pid, "tid": tid, "args": attrs}
    for start in open_spans.values():  # spans that an abort left without an end
        attrs = {**start.get("attrs", {}), "attempt": start["attempt"], "unfinished": True}
        yield _complete(start["name"], start["ts"], last, pid, tid, attrs)


def _complete(name: str, start: float, end: float, pid: int, tid: int, attrs: Attrs) -> ViewerEvent:
    duration = max(end - start, 0.0) * 1e6
    return {
        "ph": "X",
        "name": name,
        "ts": start * 1e6,
        "dur": duration,
        "pid": pid,
        "tid": tid,
        "args": attrs,
    }


def _named(kind: str, pid: int, tid: int, name: str) -> ViewerEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
