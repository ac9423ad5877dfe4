"""``--deterministic``: a request's tokens and log-probs do not change by one bit, whatever else the
engine does.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_drivers import finish, load, make, result, step
from engine_parts import make_tokenizer, save_tiny_llama
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from needs import of_all

sys.path.append(str(Path(__file__).resolve().parents[2] / "models"))
from every_family import save_tiny

from slime.plugins.embedded import loading
from slime.plugins.embedded.loading import Loaded

VARIANTS: dict[str, dict[str, Any]] = {
    "odd": {},  # hidden 44, intermediate 76: elementwise loops have tails
    "odder": {
        "hidden_size": 30,
        "intermediate_size": 53,
        "head_dim": 10,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    "even": {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
}
WITH_EXPERTS = ("Qwen3-MoE", "gpt-oss")
"""Other requests of a batch send rows to the same experts."""
EACH_COMMIT = (("odd", 1), ("even", 2), ("Qwen3-MoE", 1))
ENGINES = [
    pytest.param(kind, marks=[] if kind in EACH_COMMIT else [pytest.mark.long])
    for kind in (
        *((name, threads) for name in VARIANTS for threads in (1, 2)),
        *((name, 1) for name in WITH_EXPERTS),
    )
]


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    name, threads = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    folder = tmp_path_factory.mktemp(f"det-{name}")
    if name in VARIANTS:
        save_tiny_llama(folder, **VARIANTS[name])
    else:
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(folder)
        save_tiny(name, folder, vocab_size=len(tokenizer))
    yield load(folder, deterministic=True)
    torch.set_num_threads(before)


PROBES = [
    dict(ids=[5, 6, 7], seed=11, max_new_tokens=12),
    dict(ids=list(range(20, 95)), seed=12, max_new_tokens=10, start_len=0),
    dict(ids=[9] * 30, seed=13, max_new_tokens=40, temperature=0.8, top_p=0.9),
    dict(ids=list(range(40, 60)), seed=14, max_new_tokens=8, top_k=5, repetition_penalty=1.2),
]


def alone(loaded: Loaded) -> list[Any]:
    """Each probe by itself in an empty engine."""
    results = []
    for probe in PROBES:
        loaded.engine.scheduler.drop_slots()
        sequence = make(**probe)  # type: ignore[arg-type]
        finish(loaded, [sequence])
        results.append(result(sequence))
    return results


@pytest.fixture(scope="module")
def expected(engine: Loaded) -> list[Any]:
    return alone(engine)


@settings(
    max_examples=of_all(12, 4),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(
    chance=st.integers(0, 2**32),
    others=st.integers(0, 20),
    delays=st.lists(st.integers(0, 9), min_size=4, max_size=4),
)
def test_company_and_arrival_do_not_matter(
    engine: Loaded, expected: list[Any], chance: int, others: int, delays: list[int]
) -> None:
    draw = random.Random(chance)
    probes = [make(rid=f"probe{i}", **probe) for i, probe in enumerate(PROBES)]  # type: ignore[arg-type]
    company = []
    for i in range(others):
        ids = [draw.randrange(5, 260) for _ in range(draw.randrange(1, 70))]
        if draw.random() < 0.3:  # somebody who shares a prompt
            ids = list(PROBES[draw.randrange(4)]["ids"])  # type: ignore[call-overload]
        company.append(
            make(ids, f"other{i}", seed=draw.randrange(99), max_new_tokens=draw.randrange(1, 30))
        )
    queue = [(delay, probe) for delay, probe in zip(delays, probes, strict=True)]
    queue += [(draw.randrange(10), other) for other in company]
    draw.shuffle(queue)
    for now in range(10):
        for delay, sequence in queue:
            if delay == now:
                engine.engine.scheduler.add(sequence)
        step(engine)
        if draw.random() < 0.1:
            engine.engine.scheduler.pause("retract")
            engine.engine.scheduler.resume()
    finish(engine)
    assert [result(probe) for probe in probes] == expected


def test_a_continued_answer_equals_an_uninterrupted_one(
    engine: Loaded, expected: list[Any]
) -> None:
    """Prompt plus the tokens so far, sent again: decode and prefill give the same bits."""
    ids, logprobs, _ = expected[0]
    whole = make(
        [*PROBES[0]["ids"], *ids], seed=1, start_len=len(PROBES[0]["ids"]) - 1, max_new_tokens=1
    )  # type: ignore[misc,call-overload]
    finish(engine, [whole])
    assert whole.input_logprobs == logprobs


def test_row_counts_with_tails_are_left_out(tiny_llama: Path) -> None:
    loaded = load(tiny_llama, deterministic=True)
    assert 1 not in loaded.engine.runner.row_counts  # 44 and 76 elements are not whole vectors
    assert 64 in loaded.engine.runner.row_counts


@pytest.mark.real
@pytest.mark.long
def test_blocks_are_computed_although_mkl_was_used_before(smollm2: Path) -> None:
    """As in a notebook that has computed something, so that MKL no longer reads ``MKL_CBWR``."""
    code = (
        "import os, sys, torch; torch.randn(300, 300) @ torch.randn(300, 300)\n"
        "from slime.plugins.embedded.loading import EngineOptions, load_engine\n"
        "loaded = load_engine(EngineOptions(sys.argv[1], deterministic=True, "
        "max_total_tokens=512))\n"
        "print(max(loaded.engine.runner.row_counts))"
    )
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "2")
    environment = {
        name: value for name, value in os.environ.items() if name != "MKL_CBWR"
    } | threads
    command = [sys.executable, "-c", code, str(smollm2)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 1, done.stderr


def test_row_by_row_is_the_last_resort(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "agreeing_counts", lambda *arguments: ())
    loaded = load(tiny_llama, deterministic=True)
    assert loaded.engine.runner.row_counts == (1,)
    sequences = [
        make([5, 6, 7], seed=11, max_new_tokens=5),
        make([5, 6, 8], seed=12, max_new_tokens=5),
    ]
    finish(loaded, sequences)
    together = [result(sequence) for sequence in sequences]
    for sequence, seed, last in zip(together, (11, 12), (7, 8), strict=True):
        single = make([5, 6, last], seed=seed, max_new_tokens=5)
        finish(loaded, [single])
        assert result(single) == sequence


@pytest.mark.slow
def test_real_model(smollm2: Path) -> None:
    loaded = load(smollm2, deterministic=True, max_running_requests=64)
    ids = loaded.tokenizer(
        "<|im_start|>user\nWhat is 6 times 7?<|im_end|>\n<|im_start|>assistant\n"
    )["input_ids"]
    single = make(ids, seed=5, max_new_tokens=24)
    finish(loaded, [single])
    loaded.engine.scheduler.drop_slots()
    draw = random.Random(0)
    crowd = [
        make(
            [draw.randrange(5, 49000) for _ in range(draw.randrange(3, 60))],
            str(i),
            seed=i,
            max_new_tokens=16,
        )
        for i in range(20)
    ]
    again = make(ids, "again", seed=5, max_new_tokens=24)
    finish(loaded, [*crowd[:13], again, *crowd[13:]])
    assert result(again) == result(single)
