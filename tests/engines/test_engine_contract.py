"""What slime asks of an engine over HTTP; the same suite for every kind of engine.

Tests are marked with the capabilities that they need (``conftest.engine_url``).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from engine_parts import KEYS, ContractEngine
from safetensors.torch import save_file

from slime.config.hf_config import context_length, read_config
from slime.config.rollout import ENGINES_OWN
from slime.engines import http
from slime.engines.handle import EngineHandle
from slime.engines.keys import ServerKeys, auth_headers, send_key
from slime.engines.payload import Bucket, adapter_payload, shared_memory
from slime.engines.process import free_port
from slime.engines.sglang_api import Broadcast, EngineError
from slime.rollout.rm_hub.outcome import says_too_long
from slime.utils.async_utils import run
from slime.weights.audit import score
from slime.weights.window import UpdateWindow

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]  # a server starts with the first test

PROMPT = [20, 21, 22, 23, 24]

MAY_SKIP = {
    "embedded": set(),
    "sglang": {"seeded_sampling", "release_while_busy", "named_checksums", "weight_comparison"},
    "vllm": set(),
}
"""Capabilities that the suite asks for and each kind of engine, here on the CPU, may lack."""


def test_no_engine_skips_more_than_it_must(contract_engine: ContractEngine) -> None:
    tests = [value for name, value in globals().items() if name.startswith("test_")]
    marks = [mark for test in tests for mark in getattr(test, "pytestmark", [])]
    marks += [
        m
        for mark in marks
        if mark.name == "parametrize"
        for value in mark.args[1]
        for m in _marks_of(value)
    ]
    asked = {name for mark in marks if mark.name == "capability" for name in mark.args}
    lacking = {name for name in asked if not getattr(contract_engine.capabilities, name)}
    assert asked > lacking and lacking == MAY_SKIP[contract_engine.kind]


def _marks_of(value: Any) -> Any:
    """Marks of one ``pytest.param``."""
    return getattr(value, "marks", ())


def post(url: str, body: dict[str, Any], path: str = "/generate") -> Any:
    return run(http.post(url + path, body, max_retries=0))


def get(url: str, path: str) -> Any:
    return run(http.get(url + path, max_retries=0))


def generate(
    url: str, ids: list[int] | None = None, new: int = 6, temperature: float = 0.0, **more: Any
) -> Any:
    sampling = {
        "max_new_tokens": new,
        "temperature": temperature,
        "ignore_eos": True,
        **more.pop("sampling", {}),
    }
    return post(
        url,
        {"input_ids": ids or PROMPT, "sampling_params": sampling, "return_logprob": True, **more},
    )


def greedy_ids(url: str) -> list[int]:
    return list(generate(url)["output_ids"])


@pytest.fixture
def handle(engine_url: str) -> EngineHandle:
    return EngineHandle(engine_url)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture
def restore(contract_engine: ContractEngine, engine_url: str) -> Any:
    """Put the original weights back after a test that changes them."""
    yield
    post(engine_url, {}, "/continue_generation")
    post(
        engine_url,
        {"model_path": str(contract_engine.model), "weight_version": "default"},
        "/update_weights_from_disk",
    )


# --- generate
# --------------------------------------------------------------------------------------


def test_answer_fields(engine_url: str) -> None:
    answer = generate(engine_url, rid="my-id")
    meta = answer["meta_info"]
    assert meta["id"] == "my-id" and meta["prompt_tokens"] == 5 and meta["completion_tokens"] == 6
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(entry[0] <= 0 and entry[2] is None for entry in meta["output_token_logprobs"])
    assert (
        isinstance(answer["text"], str) and meta["e2e_latency"] > 0 and meta["cached_tokens"] >= 0
    )


def test_text_and_ids_are_the_same_prompt(engine_url: str, contract_engine: ContractEngine) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(contract_engine.model)
    text = "Hello there"
    sampling = {"max_new_tokens": 5, "temperature": 0}
    by_text = post(engine_url, {"text": text, "sampling_params": sampling})
    by_ids = generate(engine_url, tokenizer(text)["input_ids"], 5)
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_text["text"] == tokenizer.decode(by_ids["output_ids"], skip_special_tokens=True)


def test_batches_and_n(engine_url: str) -> None:
    sampling = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    batch = post(
        engine_url,
        {"input_ids": [PROMPT, [9, 9]], "sampling_params": [sampling, {**sampling, "n": 1}]},
    )
    assert [answer["output_ids"] for answer in batch] == [
        generate(engine_url, ids, 4)["output_ids"] for ids in (PROMPT, [9, 9])
    ]
    several = generate(engine_url, temperature=1.0, sampling={"n": 4})
    assert len(several) == 4 and len({tuple(answer["output_ids"]) for answer in several}) > 1


def test_prompt_logprobs_and_top_logprobs(engine_url: str) -> None:
    meta = generate(
        engine_url, logprob_start_len=0, top_logprobs_num=3, return_text_in_logprobs=True
    )["meta_info"]
    entries = meta["input_token_logprobs"]
    assert [entry[1] for entry in entries] == PROMPT
    assert entries[0][0] is None and all(entry[0] < 0 for entry in entries[1:])
    assert isinstance(entries[1][2], str)
    best = meta["output_top_logprobs"][0]
    assert len(best) == 3 and best[0][1] == meta["output_token_logprobs"][0][1]  # greedy
    assert best[0][0] == pytest.approx(meta["output_token_logprobs"][0][0], abs=1e-5)


def test_decode_and_prompt_logprobs_agree(engine_url: str) -> None:
    answer = generate(engine_url, new=8, temperature=1.0)
    whole = PROMPT + answer["output_ids"]
    scored = generate(engine_url, whole, 1, logprob_start_len=len(PROMPT) - 1)["meta_info"][
        "input_token_logprobs"
    ]
    made = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert [entry[0] for entry in scored[1:]] == pytest.approx(made, abs=1e-4)


def test_stop_forms(engine_url: str, contract_engine: ContractEngine) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(contract_engine.model)
    letters = {
        "logit_bias": {str(tokenizer.convert_tokens_to_ids(letter)): 60.0 for letter in "abcdefgh"}
    }

    def answer(**sampling: Any) -> Any:
        return generate(engine_url, new=12, sampling={**letters, "ignore_eos": False, **sampling})

    free = answer()
    third = free["output_ids"][2]
    by_id = answer(stop_token_ids=[third])
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": third}
    assert by_id["output_ids"] == free["output_ids"][: free["output_ids"].index(third) + 1]
    letter = tokenizer.decode([third])
    assert by_id["text"] == free["text"].split(letter)[0]
    assert answer(stop_token_ids=[third], no_stop_trim=True)["text"] == by_id["text"] + letter
    by_text = answer(stop=[letter, "never there"])
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": letter}
    assert by_text["text"] == by_id["text"] and by_text["output_ids"] == by_id["output_ids"]
    assert answer(stop=letter, no_stop_trim=True)["text"] == by_id["text"] + letter
    pair = free["text"][3:5]
    assert answer(stop=[pair])["text"] == free["text"].split(pair)[0]
    ignoring = answer(stop_token_ids=[third], ignore_eos=True)
    assert ignoring["output_ids"] == free["output_ids"]


def test_min_new_tokens_keeps_the_end_away(engine_url: str) -> None:
    bias = {"2": 100.0}  # the end of text, by far the best token
    ended = generate(engine_url, new=9, sampling={"ignore_eos": False, "logit_bias": bias})
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    later = generate(
        engine_url, new=9, sampling={"ignore_eos": False, "logit_bias": bias, "min_new_tokens": 4}
    )
    assert later["meta_info"]["completion_tokens"] == 5 and later["output_ids"][-1] == 2


@pytest.mark.capability("seeded_sampling")
def test_same_seed_same_tokens(engine_url: str) -> None:
    answers = [
        generate(engine_url, new=16, temperature=1.0, sampling={"sampling_seed": seed})
        for seed in (1, 1, 2)
    ]
    first, again, other = (answer["output_ids"] for answer in answers)
    assert first == again != other


async def read_stream(url: str, body: dict[str, Any], stop_after: int | None = None) -> list[str]:
    lines: list[str] = []
    key = auth_headers(f"{url}/generate")
    async with (
        aiohttp.ClientSession(headers=key) as session,
        session.post(f"{url}/generate", json=body) as answer,
    ):
        assert answer.status == 200 and answer.headers["Content-Type"].startswith(
            "text/event-stream"
        )
        async for line in answer.content:
            if line.strip():
                lines.append(line.decode().strip())
            if stop_after is not None and len(lines) >= stop_after:
                break
    return lines


def test_streaming(engine_url: str) -> None:
    whole = generate(engine_url, new=5)
    sampling = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    body = {
        "input_ids": PROMPT,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": True,
    }
    lines = run(read_stream(engine_url, body))
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [token for event in events for token in event["output_ids"]] == whole["output_ids"], (
        "each tells what is new"
    )
    assert "".join(event["text"] for event in events) == whole["text"]
    scored = [entry for event in events for entry in event["meta_info"]["output_token_logprobs"]]
    assert [entry[1] for entry in scored] == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and all(
        event["meta_info"]["finish_reason"] is None for event in events[:-1]
    )


def test_a_client_that_leaves_ends_its_request(engine_url: str, handle: EngineHandle) -> None:
    sampling = {"max_new_tokens": 400, "ignore_eos": True}
    run(
        read_stream(
            engine_url,
            {"input_ids": PROMPT, "sampling_params": sampling, "stream": True},
            stop_after=2,
        )
    )
    run(until_idle(handle))


async def until_idle(handle: EngineHandle, seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while (load := await handle.load())["running"] + load["waiting"]:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"sampling_params": {}}, "text,? (or )?input_ids"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": PROMPT, "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": PROMPT, "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [5] * 600}, "600"),
    ],
)
def test_bad_requests_are_400_with_a_sentence(
    engine_url: str, body: dict[str, Any], says: str
) -> None:
    with pytest.raises(http.HttpError, match=says) as failure:
        post(engine_url, body)
    assert failure.value.status == 400
    assert len(greedy_ids(engine_url)) == 6  # and the engine goes on


def test_what_the_client_takes_for_the_context_is_served(
    engine_url: str, contract_engine: ContractEngine
) -> None:
    """The longest request that it sends is answered in full; what it would not send is refused for
    its length.
    """
    length = context_length(read_config(str(contract_engine.model)) or {})
    assert length is not None
    for new in (1, 30):
        answer = generate(engine_url, [5] * (length - ENGINES_OWN - new), new=new)
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": new}
    with pytest.raises(http.HttpError) as refused:
        generate(engine_url, [5] * length, new=1)
    assert refused.value.status == 400 and says_too_long(refused.value)


# --- abort and pause
# -----------------------------------------------------------------------------------


async def with_running(
    url: str, count: int, act: Callable[[], Awaitable[Any]], new: int = 300
) -> list[Any]:
    """Start ``count`` long requests, wait until they run, ``act``, and return their answers."""
    handle = EngineHandle(url)
    sampling = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
    bodies = [
        {"input_ids": [30 + i, 31], "rid": f"long-{i}", "sampling_params": sampling}
        for i in range(count)
    ]
    tasks = [asyncio.ensure_future(http.post(f"{url}/generate", body)) for body in bodies]
    async with asyncio.timeout(200):
        while (await handle.load())["running"] < count:
            await asyncio.sleep(0.01)
        await act()
        return list(await asyncio.gather(*tasks))


def test_abort_one_and_all(engine_url: str, handle: EngineHandle) -> None:
    async def act() -> None:
        await handle.abort("long-1")
        await asyncio.sleep(0.05)
        await handle.abort()

    answers = run(with_running(engine_url, 3, act))
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort"] * 3
    counts = [answer["meta_info"]["completion_tokens"] for answer in answers]
    assert counts[1] <= counts[0] < 300 and len(answers[0]["output_ids"]) == counts[0]


def test_pause_in_abort_mode(engine_url: str, handle: EngineHandle) -> None:
    answers = run(with_running(engine_url, 2, lambda: handle.pause("abort")))
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}

    async def queued() -> Any:
        late = asyncio.ensure_future(http.post(f"{engine_url}/generate", {"input_ids": PROMPT}))
        await asyncio.sleep(0.3)
        assert not late.done()  # a request that comes during the pause waits
        await handle.flush_cache()
        await handle.continue_generation()
        return await asyncio.wait_for(late, 120)

    assert run(queued())["output_ids"]


@pytest.mark.parametrize(
    "mode", ["in_place", pytest.param("retract", marks=pytest.mark.capability("retract"))]
)
def test_pause_keeps_requests(engine_url: str, handle: EngineHandle, mode: Any) -> None:
    async def act() -> None:
        await handle.pause(mode)
        paused, before = await handle.load(), None
        while (
            await handle.info()
        ).kind == "sglang" and paused != before:  # it answers before its scheduler has read it
            await asyncio.sleep(0.2)
            paused, before = await handle.load(), paused
        await asyncio.sleep(0.2)
        assert await handle.load() == paused and paused["running"] + paused["waiting"] == 2, (
            "they stand still, unended"
        )
        if mode == "retract":
            await handle.flush_cache()
        else:
            with pytest.raises(EngineError, match="400"):
                await handle.flush_cache()
        await handle.continue_generation()

    answers = run(with_running(engine_url, 2, act, new=120))
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [120, 120]


def test_a_request_that_came_before_the_pause_is_aborted(
    engine_url: str, handle: EngineHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine had no requests when it was asked, and has them when it pauses."""

    async def no_requests() -> dict[str, int]:
        return {"running": 0, "waiting": 0, "tokens": 0}

    async def act() -> None:
        monkeypatch.setattr(handle, "load", no_requests)
        window = UpdateWindow("0.1", False, False, "abort", 60.0)
        await asyncio.wait_for(window.pause_and_flush(handle), 60)
        await handle.continue_generation()

    for answer in run(with_running(engine_url, 2, act, new=200)):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"


# --- weights
# ---------------------------------------------------------------------------------------------


def test_update_from_tensors(
    handle: EngineHandle, contract_engine: ContractEngine, restore: None
) -> None:
    before = greedy_ids(handle.url)
    new = tensors(contract_engine.other_model)

    async def update(state: dict[str, torch.Tensor], version: str) -> None:
        names = list(state)
        half = len(names) // 2
        buckets = [
            Bucket(0, [(name, state[name]) for name in names[:half]]),
            Bucket(1, [(name, state[name]) for name in names[half:]], last=True),
        ]
        await handle.pause("retract" if handle.capabilities.retract else "abort")
        await handle.begin_update()
        for bucket in buckets:
            await handle.push(bucket, version)
        await handle.end_update(version)
        await handle.flush_cache()
        await handle.continue_generation()

    run(update(new, "3.7"))
    answer = generate(handle.url)
    assert answer["output_ids"] != before and answer["meta_info"]["weight_version"] == "3.7"
    assert run(handle.info()).weight_version == "3.7"
    run(update(tensors(contract_engine.model), "3.8"))
    assert greedy_ids(handle.url) == before


@pytest.mark.capability("update_brackets")
def test_updates_need_brackets(handle: EngineHandle, contract_engine: ContractEngine) -> None:
    bucket = Bucket(0, list(tensors(contract_engine.model).items()), last=True)
    with pytest.raises(EngineError, match="begin_weight_update"):
        run(handle.push(bucket, "x"))
    run(handle.begin_update())
    run(handle.end_update("default"))
    with pytest.raises(EngineError, match="begin_weight_update"):
        run(handle.end_update("default"))


@pytest.mark.capability("update_brackets")
def test_an_update_that_a_dead_trainer_left_open_is_taken_over(
    handle: EngineHandle,
    contract_engine: ContractEngine,
    restore: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine has half of the weights of a trainer that is gone. The next trainer sends all, and
    it generates.
    """
    before = greedy_ids(handle.url)
    weights = list(tensors(contract_engine.other_model).items())
    run(handle.begin_update())
    run(handle.push(Bucket(0, weights[: len(weights) // 2]), "1.3"))
    with pytest.raises(http.HttpError, match="already"):
        post(handle.url, {}, "/begin_weight_update")
    run(handle.begin_update())
    assert "update open" in caplog.text
    run(handle.push(Bucket(0, list(tensors(contract_engine.model).items()), last=True), "2.0"))
    run(handle.end_update("2.0"))
    run(handle.flush_cache())
    run(handle.continue_generation())
    assert greedy_ids(handle.url) == before


def test_stock_tensor_payload(
    handle: EngineHandle, contract_engine: ContractEngine, restore: None
) -> None:
    """A list of (name, tensor) pickled as SGLang's clients do it; engines that take handles
    take no pickles.
    """
    from slime.engines.payload import pickled

    body = {
        "serialized_named_tensors": [pickled(list(tensors(contract_engine.other_model).items()))]
    }
    before = greedy_ids(handle.url)
    run(handle.begin_update())
    if handle.capabilities.plain_handles:
        with pytest.raises(http.HttpError, match="pickles"):
            post(handle.url, body, "/update_weights_from_tensor")
        run(handle.end_update("default"))
        assert greedy_ids(handle.url) == before
        return
    post(handle.url, body, "/update_weights_from_tensor")
    run(handle.end_update("by-list"))
    assert greedy_ids(handle.url) != before


def test_update_from_disk(
    handle: EngineHandle, contract_engine: ContractEngine, restore: None
) -> None:
    before = greedy_ids(handle.url)
    run(handle.load_from_disk(str(contract_engine.other_model), "disk-1"))
    answer = generate(handle.url)
    assert answer["output_ids"] != before and answer["meta_info"]["weight_version"] == "disk-1"
    with pytest.raises(EngineError):
        run(handle.load_from_disk("/no/such/folder", "disk-2"))
    assert run(handle.info()).weight_version == "disk-1"


def test_update_over_gloo(
    handle: EngineHandle, contract_engine: ContractEngine, restore: None
) -> None:
    from datetime import timedelta

    from slime.plugins.embedded.routes_weights import join_group

    state, port, name = tensors(contract_engine.other_model), free_port(), "contract-group"
    before = greedy_ids(handle.url)
    sender: dict[str, Any] = {}

    def join() -> None:
        sender["group"] = join_group("127.0.0.1", port, 0, 2, name, "gloo", timedelta(seconds=30))

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    run(handle.init_group("127.0.0.1", port, 1, 2, name, "gloo"))
    thread.join(30)

    async def update() -> None:
        await handle.begin_update()
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in state.values()]
        shapes = [list(tensor.shape) for tensor in state.values()]
        order = Broadcast(list(state), dtypes, shapes, name, "gloo-1")
        receiving = asyncio.ensure_future(handle.receive(order))
        for tensor in state.values():
            work = torch.distributed.broadcast(
                tensor.contiguous(), src=0, group=sender["group"], async_op=True
            )
            await asyncio.to_thread(work.wait)
        await receiving
        await handle.end_update("gloo-1")
        await handle.destroy_group(name)

    run(update())
    torch.distributed.destroy_process_group(sender["group"])
    answer = generate(handle.url)
    assert answer["output_ids"] != before and answer["meta_info"]["weight_version"] == "gloo-1"


@pytest.mark.capability("version_spans")
@pytest.mark.parametrize(
    "mode", ["in_place", pytest.param("retract", marks=pytest.mark.capability("retract"))]
)
def test_version_spans_of_an_update_in_flight(
    handle: EngineHandle, contract_engine: ContractEngine, restore: None, mode: Any
) -> None:
    run(handle.load_from_disk(str(contract_engine.model), "1.0"))

    async def act() -> None:
        await handle.pause(mode)
        await handle.load_from_disk(str(contract_engine.other_model), "1.1")
        await handle.continue_generation()

    for answer in run(with_running(handle.url, 2, act, new=200)):
        spans = answer["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["1.0", "1.1"]
        assert (
            spans[0]["start"] == 0
            and spans[0]["end"] == spans[1]["start"] > 0
            and spans[1]["end"] == 200
        )
        assert answer["meta_info"]["weight_version"] == "1.1"


def test_checksums_follow_the_weights(
    handle: EngineHandle, contract_engine: ContractEngine, restore: None
) -> None:
    first = run(handle.checksum())
    assert first and run(handle.checksum()) == first
    run(handle.load_from_disk(str(contract_engine.other_model), "c"))
    changed = run(handle.checksum())
    assert set(changed) == set(first)
    assert any(changed[name] != first[name] for name in first)


@pytest.mark.capability("named_checksums")
def test_checksums_are_those_of_the_checkpoint(
    handle: EngineHandle, contract_engine: ContractEngine
) -> None:
    from slime.models.digest import tensor_digest

    run(handle.load_from_disk(str(contract_engine.model), "default"))
    expected = {
        name: tensor_digest(tensor.float())
        for name, tensor in tensors(contract_engine.model).items()
    }
    assert run(handle.checksum()) == expected


@pytest.mark.capability("weight_comparison")
def test_every_tensor_is_written(
    handle: EngineHandle, contract_engine: ContractEngine, restore: None
) -> None:
    run(handle.check_weights("snapshot"))
    run(handle.check_weights("reset_tensors"))
    run(handle.load_from_disk(str(contract_engine.model), "default"))
    run(handle.check_weights("compare"))
    run(handle.check_weights("snapshot"))
    run(handle.check_weights("reset_tensors"))
    with pytest.raises(EngineError, match=r"differ|400"):
        run(handle.check_weights("compare"))


def test_weights_by_name(engine_url: str, contract_engine: ContractEngine) -> None:
    name = "model.embed_tokens.weight"
    values = post(engine_url, {"name": name, "truncate_size": 2}, "/get_weights_by_name")
    expected = tensors(contract_engine.model)[name][:2].float()
    torch.testing.assert_close(torch.tensor(values), expected)


# --- adapters
# ---------------------------------------------------------------------------------------------


def adapter(model: Path, seed: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """PEFT's configuration and random factors of all projections of the attention's inputs."""
    weights = {
        name.removesuffix(".weight"): tensor
        for name, tensor in tensors(model).items()
        if name.rpartition("_proj")[0].endswith(("q", "k", "v"))
    }
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8.0}
    config |= {"bias": "none", "target_modules": list(weights), "base_model_name_or_path": ""}
    torch.manual_seed(seed)
    factors = {}
    for name, weight in weights.items():
        rows, columns = weight.shape
        factors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(4, columns)
        factors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, 4)
    return config, factors


def merged_scores(model: Path, factors: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Log-probs of each token but the first, with the adapter merged into the weights."""
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, a in factors.items():
        if ".lora_A." in name:
            layer = merged.get_submodule(name.removeprefix("base_model.model.").split(".lora_A")[0])
            layer.weight.data += 2.0 * factors[name.replace("lora_A", "lora_B")] @ a
    with torch.no_grad():
        scores = merged(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.capability("named_adapters")
def test_adapters_by_name(
    handle: EngineHandle, contract_engine: ContractEngine, tmp_path: Path
) -> None:
    """From files and from memory; a new one takes the place of that of its name, and its KV cache
    is not that of the old one."""
    model = contract_engine.model
    tokens = list(range(20, 84))
    (config, first), (_, second) = adapter(model, 1), adapter(model, 2)
    save_file(first, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    in_memory = Bucket(0, list(second.items()), last=True, adapter=True)

    async def load(source: Any) -> None:
        await handle.pause("abort")
        await handle.load_adapter(await handle.adapter_request("mine", config, source))
        await handle.continue_generation()

    def check(factors: dict[str, torch.Tensor], name: str | None) -> None:
        found = torch.tensor(run(score(handle, tokens, name)))
        torch.testing.assert_close(found, merged_scores(model, factors, tokens), atol=1e-4, rtol=0)

    with pytest.raises(EngineError, match="mine"):
        run(score(handle, tokens, "mine"))
    run(load(tmp_path))
    check(first, "mine")
    run(load(adapter_payload(in_memory, digests=False, memory=shared_memory)))
    check(second, "mine")
    check({}, None)
    run(load(tmp_path))
    check(first, "mine")
    for _ in range(2):  # there is none any more
        run(handle.unload_adapter("mine"))
    check({}, None)


# --- memory, health, facts
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tags", [(), ("kv_cache",), ("weights",)])
def test_release_and_resume(handle: EngineHandle, tags: Any) -> None:
    before = greedy_ids(handle.url)
    run(handle.flush_cache())
    run(handle.release(tags))
    run(handle.resume(tags))
    assert greedy_ids(handle.url) == before


@pytest.mark.capability("release_while_busy")
def test_release_while_requests_run(handle: EngineHandle) -> None:
    async def act() -> None:
        await handle.release(())
        await asyncio.sleep(0.1)
        assert await handle.health(60)
        await handle.resume(("weights",))
        await handle.resume(("kv_cache", "cuda_graph"))

    answers = run(with_running(handle.url, 2, act, new=100))
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [100, 100]


def test_health_and_facts(handle: EngineHandle, contract_engine: ContractEngine) -> None:
    assert run(handle.health(20))
    info = run(handle.info())
    assert info.kind == contract_engine.kind and info.model_path == str(contract_engine.model)
    assert isinstance(handle, EngineHandle)
    assert run(handle.load()) == {"running": 0, "waiting": 0, "tokens": 0}
    assert get(handle.url, "/v1/models")["data"][0]["id"]


def test_only_the_keys_of_the_run_open_it(engine_url: str) -> None:
    """The key of requests is not enough for calls that change the engine."""
    routes = {
        ("POST", "/generate"): KEYS.api,
        ("GET", "/server_info"): KEYS.api,
        ("POST", "/pause_generation"): KEYS.admin,
    }

    def opens(method: str, path: str, key: str | None) -> bool:
        send_key(engine_url, ServerKeys(key))
        return (
            http.request_blocking(
                method, engine_url + path, {} if method == "POST" else None, timeout=30
            )[0]
            != 401
        )

    try:
        for (method, path), right in routes.items():
            keys = (None, "wrong", KEYS.api) if right == KEYS.admin else (None, "wrong")
            assert [opens(method, path, key) for key in keys] == [False] * len(keys), path
        assert opens("GET", "/health", None)
    finally:
        send_key(engine_url, KEYS)


def test_neither_its_command_lines_nor_its_log_show_the_keys(
    engine_url: str, contract_engine: ContractEngine
) -> None:
    process = contract_engine.process
    assert process.log_path is not None
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    words = " ".join(word for part in tree for word in part.cmdline())
    assert (
        "-m slime." in words
        and "sesame" not in words
        and "sesame" not in process.log_path.read_text()
    )


def test_openai_forms(engine_url: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chat = post(
        engine_url,
        {"messages": messages, "max_tokens": 4, "temperature": 0},
        "/v1/chat/completions",
    )
    assert (
        chat["object"] == "chat.completion" and chat["choices"][0]["message"]["role"] == "assistant"
    )
    assert chat["usage"]["completion_tokens"] <= 4
    plain = post(
        engine_url,
        {"prompt": "Hi", "max_tokens": 4, "temperature": 0, "logprobs": 2},
        "/v1/completions",
    )
    assert plain["choices"][0]["finish_reason"] in ("length", "stop")
    assert (
        len(plain["choices"][0]["logprobs"]["token_logprobs"])
        == plain["usage"]["completion_tokens"]
    )
