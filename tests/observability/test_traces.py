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

from slime.observability import trace_utils
from slime.observability.trace_file import add_phases, trace_of, write_trace_file
from slime.observability.trace_utils import (
    bind_trace,
    build_sglang_meta_trace_attrs,
    export_trace,
    import_trace,
    trace_event,
    trace_function,
    trace_next_attempt,
    trace_span,
)


def make(index: int = 0, group: int = 0) -> SimpleNamespace:
    return SimpleNamespace(index=index, group_index=group)


def names(sample: SimpleNamespace) -> list[tuple[str, str]]:
    return [(event["type"], event["name"]) for event in sample.trace["events"]]


def test_a_span_starts_ends_and_holds_what_was_learned_in_it() -> None:
    sample = make(7, 3)
    with trace_span(sample, "sglang_generate", {"turn": 0}) as span:
        trace_event(sample, "retry", {"status": 503})
        span.set(tokens=20)
    assert names(sample) == [("span_start", "sglang_generate"), ("event", "retry"), ("span_end", "sglang_generate")]
    start, event, end = sample.trace["events"]
    assert start["attrs"] == {"turn": 0} and end["attrs"] == {"tokens": 20}
    assert start["span_id"] == end["span_id"] == event["parent_id"]
    assert start["ts"] <= event["ts"] <= end["ts"]
    assert (sample.trace["sample_id"], sample.trace["group_id"], sample.trace["attempt"]) == (7, 3, 0)


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
    trace_next_attempt(group[2])
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

    @trace_function("generate_and_rm", target="sample", attrs_getter=lambda sample, delay: {"delay": delay})
    async def work(sample: SimpleNamespace, delay: float) -> int:
        await asyncio.sleep(delay)
        trace_event(None, "inside")
        return sample.index

    async def everything() -> list[int]:
        return await asyncio.gather(*(work(sample, 0.001 * (8 - sample.index)) for sample in samples))

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
    assert all(names(sample) == [("span_start", "judge"), ("span_end", "judge")] for sample in samples)


@pytest.mark.parametrize("target", [42, "text", object(), None, [3, None], {"a": 1}])
def test_nothing_raises_on_a_target_that_can_carry_no_trace(target: object) -> None:
    with trace_span(target, "x"):
        trace_event(target, "y")
    assert bind_trace(3) is None
    assert export_trace(target) is None


def test_a_failing_getter_is_said_once_and_the_function_runs(caplog: pytest.LogCaptureFixture) -> None:
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
            trace_next_attempt(sample)
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
    meta = {"prompt_tokens": 5, "completion_tokens": 9, "cached_tokens": None, "finish_reason": {"type": "stop"}}
    meta |= {"output_token_logprobs": [[-0.1, 3]], "weight_version": "0.4"}
    assert build_sglang_meta_trace_attrs(meta) == {
        "prompt_tokens": 5, "completion_tokens": 9, "weight_version": "0.4", "finish_reason": "stop",
    }  # fmt: skip
    assert build_sglang_meta_trace_attrs(None) == {}


def test_the_file_has_groups_as_processes_samples_as_threads_and_whole_spans(tmp_path: Path) -> None:
    samples = [make(10, 4), make(11, 4), make(12, 5)]
    for sample in samples[:2]:
        with trace_span(sample, "generate_and_rm"), trace_span(sample, "sglang_generate"):
            trace_event(sample, "token")
    span = trace_span(samples[1], "reward_model")
    span.__enter__()  # aborted: never ends
    phases = [{"name": "rollout", "start": 100.0, "end": 101.5}]
    path = write_trace_file(tmp_path / "traces" / "rollout_000001.json", samples, phases)
    assert path is not None
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in spans} == {(0, 0), (5, 10), (5, 11)}
    rollout = next(event for event in spans if event["name"] == "rollout")
    assert rollout["ts"] == 100e6 and rollout["dur"] == 1.5e6
    assert [e["args"].get("unfinished") for e in spans if e["name"] == "reward_model"] == [True]
    assert len([event for event in events if event["ph"] == "i"]) == 2
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"driver", "group 4"}


def test_no_file_without_traces(tmp_path: Path) -> None:
    assert write_trace_file(tmp_path / "t.json", [make()]) is None
    assert list(tmp_path.iterdir()) == []


def test_the_trace_of_a_rollout_shows_what_trained_while_it_was_generated(tmp_path: Path) -> None:
    path = trace_of(tmp_path, 3)
    add_phases(path, [{"name": "train", "start": 1.0, "end": 2.0}])
    assert not path.exists(), "no trace: nothing to add to"
    sample = make()
    with trace_span(sample, "sglang_generate"):
        began = time.time()
    write_trace_file(path, [sample])
    before = json.loads(path.read_text())["traceEvents"]
    earlier = {"name": "rollout", "start": began - 9, "end": began - 5}
    add_phases(path, [earlier, {"name": "train", "start": began - 2, "end": began + 3}])
    after = json.loads(path.read_text())["traceEvents"]
    assert after[: len(before)] == before
    assert [event["name"] for event in after[len(before) :] if event["ph"] == "X"] == ["train"]
