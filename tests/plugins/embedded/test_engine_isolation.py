"""A step that raises ends the request that is to blame and no other; an engine that fails by itself
ends.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served_engine import Served, served

from slime.plugins.embedded import engine as engine_module
from slime.plugins.embedded.sampling import sample_tokens

Fault = Callable[[list[Any]], bool]
"""Whether sampling for these sequences raises."""


@pytest.fixture
def one(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with served(tiny_llama) as server:
        yield server


def inject(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    def faulty(logits: Any, sequences: list[Any], *rest: Any) -> Any:
        if fault(list(sequences)):
            raise ZeroDivisionError("injected")
        return sample_tokens(logits, sequences, *rest)

    monkeypatch.setattr(engine_module, "sample_tokens", faulty)


def body(number: int, rid: str = "", **more: Any) -> dict[str, Any]:
    sampling = {
        "max_new_tokens": 24,
        "temperature": 1.0,
        "sampling_seed": number,
        "ignore_eos": True,
    }
    return {
        "input_ids": [20, 21 + number],
        "sampling_params": sampling,
        "return_logprob": True,
        "rid": rid,
        **more,
    }


def ask_all(server: Served, bodies: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda one: server.ask("/generate", one), bodies))


@pytest.mark.parametrize("at", [0, 5])
def test_only_the_culprit_fails(one: Served, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    alone = [one.ask("/generate", body(number))[1]["output_ids"] for number in range(4)]
    bad = ("bad-1", "bad-2")
    inject(
        monkeypatch,
        lambda seqs: any(seq.request.rid in bad and seq.num_output >= at for seq in seqs),
    )
    bodies = [body(0), body(5, bad[0]), body(1), body(6, bad[1]), body(2), body(3)]
    answers = ask_all(one, bodies)
    assert [status for status, _ in answers] == [200, 500, 200, 500, 200, 200]
    assert "ZeroDivisionError: injected" in answers[1][1]["error"]["message"]
    assert [answer["output_ids"] for status, answer in answers if status == 200] == alone
    for status, answer in answers:
        if status == 200:
            assert len(answer["meta_info"]["output_token_logprobs"]) == 24
    engine = one.loaded.engine
    assert engine.failure is None and not engine.scheduler.running and not engine.scheduler.waiting
    assert engine.scheduler.alone is None and one.ask("/health_generate", method="GET")[0] == 200


def test_prompt_log_probs_survive_the_fault_of_another(
    one: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = body(1, logprob_start_len=0, input_ids=list(range(20, 60)), top_logprobs_num=2)
    expected = one.ask("/generate", wanted)[1]["meta_info"]
    one.ask("/flush_cache")
    inject(monkeypatch, lambda seqs: any(seq.request.rid == "bad" for seq in seqs))
    (_, answer), (status, _) = ask_all(one, [wanted, body(6, "bad")])
    assert status == 500
    for name in ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs"):
        got, want = answer["meta_info"][name], expected[name]
        assert len(got) == len(want) and json.dumps(got)[:60] and len(got) > 0


def test_a_stream_is_told(one: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(
        monkeypatch,
        lambda seqs: any(seq.request.rid == "bad" and seq.num_output >= 3 for seq in seqs),
    )
    status, text = one.ask("/generate", body(0, "bad", stream=True))
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert (
        status == 200
        and events[-1]["error"]["code"] == 500
        and "injected" in events[-1]["error"]["message"]
    )


def test_a_fault_that_does_not_come_again_fails_nobody(
    one: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = iter([True])
    inject(monkeypatch, lambda seqs: len(seqs) > 1 and next(faults, False))
    assert [status for status, _ in ask_all(one, [body(n) for n in range(4)])] == [200] * 4
    assert next(faults, None) is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_every_joint_step_ends_the_engine(
    one: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is too small for the batch, say: each passes alone, and together they fail
    again.
    """
    inject(monkeypatch, lambda seqs: len(seqs) > 1)
    answers = ask_all(one, [{**body(n), "input_ids": [[20, 21], [22, 23]]} for n in range(1)])
    assert answers[0][0] == 500 and one.ask("/health", method="GET")[0] == 503


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_engine_itself_ends_it(one: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, lambda seqs: True)
    assert one.ask("/generate", body(0))[0] == 500
    assert (
        one.ask("/health", method="GET")[0] == one.ask("/health_generate", method="GET")[0] == 503
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_commands_that_wait_when_the_engine_ends_are_answered(
    one: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They came while the step that ended it was under way, and nobody takes them any more."""
    engine, ending, may_end = one.loaded.engine, threading.Event(), threading.Event()

    def fault(sequences: list[Any]) -> bool:
        if sequences[0].request.rid == "probe":  # when this one fails, the engine is to blame
            ending.set()
            may_end.wait(60)
        return True

    inject(monkeypatch, fault)
    with ThreadPoolExecutor(2) as pool:
        request = pool.submit(one.ask, "/generate", body(1))
        assert ending.wait(60)
        pause = pool.submit(one.ask, "/pause_generation", {})
        while engine.inbox.empty():
            time.sleep(0.01)
        may_end.set()
        assert request.result(60)[0] == pause.result(60)[0] == 500
    assert one.ask("/pause_generation", {})[0] == 500
