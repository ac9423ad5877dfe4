"""Traces of a rollout and phases of the driver as one Chrome/Perfetto JSON file (open in ui.perfetto.dev)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from slime.observability.best_effort import best_effort

DRIVER = 0  # process id of the driver's row in the viewer; prompt groups follow it


def trace_of(run_dir: Path, rollout_id: int) -> Path:
    """Where the trace of a rollout is."""
    return run_dir / "traces" / f"rollout_{rollout_id:06d}.json"


def write_trace_file(path: Path, samples: Iterable[Any], phases: Sequence[dict[str, Any]] = ()) -> Path | None:
    """Write one file: a process row per prompt group, a thread row per sample, one row of driver phases.

    Args:
        path: where to; the folder is made.
        samples: flat; those without a trace are left out.
        phases: ``{"name", "start", "end"}`` in wall seconds, e.g. of :class:`~slime.observability.timers.Timers`.

    Returns:
        The path, or None when there was nothing to write.
    """
    events = list(_phase_events(phases))
    for position, sample in enumerate(samples):
        trace = getattr(sample, "trace", None)
        if isinstance(trace, dict) and trace.get("events"):
            events.extend(_sample_events(trace, position))
    if not events:
        return None
    _write(path, {"displayTimeUnit": "ms", "traceEvents": events})
    return path


def add_phases(path: Path, phases: Sequence[dict[str, Any]]) -> None:
    """Add the driver's row to the trace of a rollout that is trained by now: those phases that are not over before its
    first event. So the file of a rollout that was generated ahead shows what trained meanwhile."""
    if not path.is_file():
        return
    trace = json.loads(path.read_bytes())
    starts = [event["ts"] for event in trace["traceEvents"] if "ts" in event]
    first = min(starts, default=0.0) / 1e6
    trace["traceEvents"] += _phase_events([phase for phase in phases if phase["end"] >= first])
    _write(path, trace)


def _write(path: Path, trace: dict[str, Any]) -> None:
    with best_effort("traces"):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(trace, default=str))
        temporary.replace(path)


def _phase_events(phases: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    if phases:
        yield _named("process_name", DRIVER, 0, "driver")
    for phase in phases:
        yield _complete(phase["name"], phase["start"], phase["end"], DRIVER, 0, {})


def _sample_events(trace: dict[str, Any], position: int) -> Iterable[dict[str, Any]]:
    group, sample = trace.get("group_id"), trace.get("sample_id")
    pid = 1 + (group if group is not None else position)
    tid = sample if sample is not None else position
    yield _named("process_name", pid, 0, f"group {group}")
    yield _named("thread_name", pid, tid, f"sample {sample}")
    open_spans: dict[str, dict[str, Any]] = {}
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
            yield {"ph": "i", "s": "t", "name": event["name"], "ts": event["ts"] * 1e6, "pid": pid, "tid": tid, "args": attrs}  # fmt: skip  # noqa: E501
    for start in open_spans.values():  # aborted in the middle
        attrs = {**start.get("attrs", {}), "attempt": start["attempt"], "unfinished": True}
        yield _complete(start["name"], start["ts"], last, pid, tid, attrs)


def _complete(name: str, start: float, end: float, pid: int, tid: int, attrs: dict[str, Any]) -> dict[str, Any]:
    duration = max(end - start, 0.0) * 1e6  # the format counts microseconds
    return {"ph": "X", "name": name, "ts": start * 1e6, "dur": duration, "pid": pid, "tid": tid, "args": attrs}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
