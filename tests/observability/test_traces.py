"""Spans on samples: structure, nesting, failure, and the Perfetto file made of them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.observability import trace_file, trace_utils
from slime.observability.progress import Span
from slime.observability.trace_file import Load, TraceFiles, trace_of, traces_of, within
from slime.observability.trace_utils import (
    bind_trace,
    build_sglang_meta_trace_attrs,
    export_trace,
    import_trace,
    trace_event,
    trace_function,
    trace_span,
)
from slime.plugins.tools.summary import read_trace


def make(index: int = 0, group: int = 0) -> SimpleNamespace:
    return SimpleNamespace(index=index, group_index=group)


def names(sample: SimpleNamespace) -> list[tuple[str, str]]:
    return [(event["type"], event["name"]) for event in sample.trace["events"]]


def test_a_span_starts_ends_and_holds_what_was_learned_in_it() -> None:
    sample = make(7, 3)
    with trace_span(sample, "sglang_generate", {"turn": 0}) as span:
        trace_event(sample, "retry", {"status": 503})
        span.set(tokens=20)
    assert names(sample) == [
        ("span_start", "sglang_generate"),
        ("event", "retry"),
        ("span_end", "sglang_generate"),
    ]
    start, event, end = sample.trace["events"]
    assert start["attrs"] == {"turn": 0} and end["attrs"] == {"tokens": 20}
    assert start["span_id"] == end["span_id"] == event["parent_id"]
    assert start["ts"] <= event["ts"] <= end["ts"]
    assert (sample.trace["sample_id"], sample.trace["group_id"], sample.trace["attempt"]) == (
        7,
        3,
        0,
    )


def test_a_span_on_a_group_reaches_every_sample_and_inner_spans_without_target_too() -> None:
    group = [make(0), [make(1), make(2)]]
    with trace_span(group, "generate_and_rm_group"), trace_span(None, "group_reward_model"):
        pass
    for sample in (group[0], *group[1]):
        assert [name for kind, name in names(sample) if kind == "span_start"] == [
            "generate_and_rm_group",
            "group_reward_model",
        ]
        outer, inner = sample.trace["events"][0], sample.trace["events"][1]
        assert inner["parent_id"] == outer["span_id"]


def test_samples_of_a_group_share_an_event_as_long_as_they_are_at_the_same_attempt() -> None:
    group = [make(0), make(1), make(2)]
    bind_trace(group[2])["attempt"] += 1
    trace_event(group, "given_back")
    first, second, third = (sample.trace["events"][0] for sample in group)
    assert first is second and first["attempt"] == 0
    assert third == {**first, "attempt": 1}


def test_an_exception_ends_the_span_and_goes_on() -> None:
    sample = make()
    with pytest.raises(ValueError, match="broken"), trace_span(sample, "reward_model"):
        raise ValueError("broken")
    assert sample.trace["events"][-1]["attrs"] == {"error": "ValueError"}


def test_spans_of_concurrent_tasks_do_not_mix() -> None:
    samples = [make(i) for i in range(8)]

    @trace_function(
        "generate_and_rm", target="sample", attrs_getter=lambda sample, delay: {"delay": delay}
    )
    async def work(sample: SimpleNamespace, delay: float) -> int:
        await asyncio.sleep(delay)
        trace_event(None, "inside")
        return sample.index

    async def everything() -> list[int]:
        return await asyncio.gather(
            *(work(sample, 0.001 * (8 - sample.index)) for sample in samples)
        )

    assert asyncio.run(everything()) == list(range(8))
    for sample in samples:
        assert names(sample) == [
            ("span_start", "generate_and_rm"),
            ("event", "inside"),
            ("span_end", "generate_and_rm"),
        ]
        assert sample.trace["events"][1]["parent_id"] == sample.trace["events"][0]["span_id"]


def test_functions_keep_name_and_result_and_take_a_getter() -> None:
    @trace_function("judge", target_getter=lambda batch: batch["samples"])
    def judge(batch: dict) -> str:
        """Doc."""
        return "done"

    samples = [make(0), make(1)]
    assert judge({"samples": samples}) == "done"
    assert judge.__name__ == "judge" and judge.__doc__ == "Doc."
    assert all(
        names(sample) == [("span_start", "judge"), ("span_end", "judge")] for sample in samples
    )


@pytest.mark.parametrize("target", [42, "text", object(), None, [3, None], {"a": 1}])
def test_nothing_raises_on_a_target_that_can_carry_no_trace(target: object) -> None:
    with trace_span(target, "x"):
        trace_event(target, "y")
    assert bind_trace(3) is None
    assert export_trace(target) is None


def test_a_failing_getter_is_said_once_and_the_function_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trace_utils._reported.clear()

    @trace_function("f", target_getter=lambda: 1 / 0)
    def f() -> int:
        return 5

    with caplog.at_level(logging.WARNING):
        assert (f(), f()) == (5, 5)
    assert len([record for record in caplog.records if "ZeroDivisionError" in record.message]) == 1


@given(st.lists(st.sampled_from(["span", "event", "attempt"]), max_size=12))
def test_export_and_import_give_the_same_trace_and_share_nothing(steps: list[str]) -> None:
    sample, other = make(1), make(1)
    bind_trace(sample)
    for step in steps:
        if step == "span":
            with trace_span(sample, "s"):
                pass
        elif step == "event":
            trace_event(sample, "e")
        else:
            sample.trace["attempt"] += 1
    exported = export_trace(sample)
    import_trace(other, json.loads(json.dumps(exported)))
    assert other.trace == sample.trace
    assert sample.trace["attempt"] == steps.count("attempt")
    other.trace["events"].append("x")
    assert export_trace(sample) == exported


def test_import_refuses_what_is_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    trace_utils._reported.clear()
    sample = make()
    import_trace(sample, {"version": 99, "events": []})
    assert not hasattr(sample, "trace") and "not a trace" in caplog.text


def test_attributes_of_an_engines_answer() -> None:
    meta = {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "cached_tokens": None,
        "finish_reason": {"type": "stop"},
    }
    meta |= {"output_token_logprobs": [[-0.1, 3]], "weight_version": "0.4"}
    assert build_sglang_meta_trace_attrs(meta) == {
        "prompt_tokens": 5, "completion_tokens": 9, "weight_version": "0.4", "finish_reason": "stop",
    }  # fmt: skip
    assert build_sglang_meta_trace_attrs(None) == {}


def test_the_file_has_groups_as_processes_samples_as_threads_and_whole_spans(
    tmp_path: Path,
) -> None:
    samples = [make(10, 4), make(11, 4), make(12, 5)]
    for sample in samples[:2]:
        with trace_span(sample, "generate_and_rm"), trace_span(sample, "sglang_generate"):
            trace_event(sample, "token")
    span = trace_span(samples[1], "reward_model")
    span.__enter__()  # aborted: never ends
    end = time.time() + 1.5
    files = TraceFiles(tmp_path)
    path = files.write_samples(1, samples)
    assert path == tmp_path / "traces" / "rollout_000001.json.gz"
    files.add_phases(1, [{"name": "rollout", "start": end - 1.5, "end": end}])
    events = read_trace(path)
    spans = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in spans} == {(0, 0), (5, 10), (5, 11)}
    rollout = next(event for event in spans if event["name"] == "rollout")
    assert rollout["ts"] == (end - 1.5) * 1e6 and rollout["dur"] == pytest.approx(1.5e6)
    assert [e["args"].get("unfinished") for e in spans if e["name"] == "reward_model"] == [True]
    instants = {event["tid"]: event["ts"] for event in events if event["ph"] == "i"}
    recorded = {
        sample.index: next(e["ts"] for e in sample.trace["events"] if e["type"] == "event")
        for sample in samples[:2]
    }
    assert instants == {index: seconds * 1e6 for index, seconds in recorded.items()}, (
        "Perfetto counts microseconds"
    )
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "driver",
        "group 4",
    }


def test_no_file_without_traces(tmp_path: Path) -> None:
    files = TraceFiles(tmp_path)
    assert files.write_samples(0, [make()]) is None
    files.add_phases(0, [{"name": "train", "start": 1.0, "end": 2.0}])
    assert list(tmp_path.iterdir()) == []


def test_the_trace_of_a_rollout_shows_what_trained_while_it_was_generated(tmp_path: Path) -> None:
    path = trace_of(tmp_path, 3)
    files = TraceFiles(tmp_path)
    sample = make()
    with trace_span(sample, "sglang_generate"):
        began = time.time()
    files.write_samples(3, [sample])
    before = read_trace(path)
    earlier = {"name": "rollout", "start": began - 9, "end": began - 5}
    path.write_text("it is not read again")
    files.add_phases(3, [earlier, {"name": "train", "start": began - 2, "end": began + 3}])
    after = read_trace(path)
    assert after[: len(before)] == before
    assert [event["name"] for event in after[len(before) :] if event["ph"] == "X"] == ["train"]


def test_the_file_has_a_thread_for_each_rank_and_a_counter_for_each_engine(tmp_path: Path) -> None:
    files, sample = TraceFiles(tmp_path), make()
    with trace_span(sample, "sglang_generate"):
        began = time.time()
    path = files.write_samples(0, [sample])
    assert path is not None
    asked: list[tuple[float, float]] = []

    def loads_between(start: float, end: float) -> list[Load]:
        asked.append((start, end))
        load = Load(time=began, engine=1, state="serving", running=3, waiting=2, tokens=40)
        return [load, {**load, "state": "paused", "running": None, "waiting": None, "tokens": None}]

    phases: list[Span] = [{"name": "train", "start": began, "end": began + 4}]
    phases += [
        {"name": "log_probs", "start": began + 1, "end": began + r, "process": f"actor rank {r}"}
        for r in (2, 3)
    ]
    files.add_phases(0, phases, loads_between)
    events = [event for event in read_trace(path) if event["pid"] == 0]
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    spans = [(names.get(event["tid"]), event["name"]) for event in events if event["ph"] == "X"]
    assert spans == [(None, "train"), ("actor rank 2", "log_probs"), ("actor rank 3", "log_probs")]
    counters = [(event["name"], event["args"]) for event in events if event["ph"] == "C"]
    assert counters == [
        ("engine 1", {"running": 3, "waiting": 2}),
        ("engine 1", {"running": 0, "waiting": 0}),
    ]
    assert asked[0][0] <= began and asked[0][1] == began + 4


def spans_of(groups: int, size: int) -> list[SimpleNamespace]:
    """Samples with four events each."""
    samples = [make(group * size + i, group) for group in range(groups) for i in range(size)]
    for sample in samples:
        with trace_span(sample, "generate_and_rm"), trace_span(sample, "sglang_generate"):
            pass
    return samples


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 60))
def test_a_file_holds_whole_groups_and_no_more_events_than_allowed(
    groups: int, size: int, most: int
) -> None:
    kept = within(traces_of(spans_of(groups, size)), most)
    by_group: dict[int, int] = {}
    for _, trace in kept:
        by_group[trace["group_id"]] = by_group.get(trace["group_id"], 0) + 1
    assert set(by_group.values()) == {size}
    assert 0 in by_group
    assert len(by_group) == groups or len(by_group) * size * 4 <= most + size * 4
    distances = {b - a for a, b in zip(sorted(by_group), sorted(by_group)[1:], strict=False)}
    assert len(distances) <= 1


def test_traces_are_compressed_capped_and_removed_in_turn(tmp_path: Path) -> None:
    files = TraceFiles(tmp_path, last=2, most_events=400)
    for rollout in range(5):
        path = files.write_samples(rollout, spans_of(50, 4))
        files.add_phases(rollout, [{"name": "train", "start": time.time(), "end": time.time() + 1}])
    assert path is not None
    spans = [event for event in read_trace(path) if event["ph"] == "X"]
    assert len(spans) == 400 // 2 + 1, "two events make a span; one is the driver's"
    assert path.stat().st_size < 400 * 40
    assert sorted(file.name for file in (tmp_path / "traces").iterdir()) == [
        "rollout_000003.json.gz", "rollout_000004.json.gz",
    ]  # fmt: skip
    assert not files.unfinished


def test_traces_that_the_driver_never_completes_are_forgotten(tmp_path: Path) -> None:
    files = TraceFiles(tmp_path)
    for rollout in range(trace_file.MOST_OPEN + 9):
        files.write_samples(rollout, spans_of(1, 1))
    assert len(files.unfinished) == trace_file.MOST_OPEN
    files.add_phases(0, [{"name": "train", "start": time.time(), "end": time.time() + 1}])
    assert len(read_trace(trace_of(tmp_path, 0))) > 0


def test_of_many_loads_every_engine_keeps_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "MOST_LOADS", 8)
    loads = [
        Load(
            time=float(second), engine=engine, state="serving", running=second, waiting=0, tokens=0
        )
        for second in range(8)
        for engine in range(2)
    ]
    found = [(event["name"], event["ts"]) for event in trace_file.load_events(loads)]
    assert sorted(found) == [
        (f"engine {engine}", second * 1e6) for engine in range(2) for second in (0, 2, 4, 6)
    ]
