"""Wrong types and values in every field of the embedded engine's requests: a 4xx that names the
field, and the engine answers as before."""

from __future__ import annotations

import base64
import io
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served_engine import Served, served

from slime.plugins.embedded import images, routes_weights
from slime.plugins.embedded.images import load_image
from slime.plugins.http.server import BadRequest

WRONG: list[Any] = [
    *(
        "x",
        "",
        "1",
        [],
        [5],
        [[5]],
        ["a"],
        [None],
        [{}],
        {},
        {"a": 1},
        True,
        False,
        0,
        -1,
        1.5,
        -0.5,
        1e308,
        -1e308,
    ),
    *(2**63, 2**31, -99999, 49152),
]
SAMPLING = (
    *(
        "max_new_tokens",
        "min_new_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
    ),
    *(
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "ignore_eos",
        "skip_special_tokens",
    ),
    *("spaces_between_special_tokens", "no_stop_trim", "logit_bias", "sampling_seed", "n"),
)
NATIVE = (
    *(
        "rid",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
    ),
    *(
        "image_data",
        "return_text_in_logprobs",
        "return_top_p_token_ids",
        "stream",
        "weight_version_plan",
    ),
    *("text", "input_ids", "input_embeds"),
)
OPENAI = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "frequency_penalty",
        "presence_penalty",
    ),
    *(
        "repetition_penalty",
        "logit_bias",
        "ignore_eos",
        "skip_special_tokens",
        "no_stop_trim",
        "n",
        "max_tokens",
    ),
    *("max_completion_tokens", "seed", "logprobs", "top_logprobs", "stream", "model"),
    *("echo", "suffix", "response_format", "stream_options"),
)
CHAT = (*OPENAI, "messages", "tools", "chat_template_kwargs")
COMPLETIONS = (*OPENAI, "prompt")


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Served]:
    with served(tiny_llama) as one:
        yield one


def body_for(route: str, field: str, value: Any) -> dict[str, Any]:
    if route == "/generate":
        sampling: dict[str, Any] = {"max_new_tokens": 2}
        if field in SAMPLING:
            sampling[field] = value
            return {"input_ids": [20, 21], "sampling_params": sampling, "return_logprob": True}
        prompt = {} if field in ("text", "input_ids") else {"input_ids": [20, 21]}
        return {**prompt, "sampling_params": sampling, "return_logprob": True, field: value}
    if route == "/v1/chat/completions":
        return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, field: value}
    return {"prompt": "hi", "max_tokens": 2, field: value}


CASES = [
    *(("/generate", field) for field in (*NATIVE, *SAMPLING)),
    *(("/v1/chat/completions", field) for field in CHAT if field not in OPENAI[1::2]),
    *(("/v1/completions", field) for field in COMPLETIONS if field not in OPENAI[::2]),
]


# Both routes read these fields with the same functions, so each commit has each of them on one.
LONG_CASES = [
    *(("/v1/chat/completions", field) for field in OPENAI[1::2]),
    *(("/v1/completions", field) for field in OPENAI[::2]),
]


@pytest.mark.parametrize(
    ("route", "field"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)],
)
def test_wrong_types_name_the_field_and_harm_nobody(engine: Served, route: str, field: str) -> None:
    before = engine.greedy()
    for value in WRONG:
        status, answer = engine.ask(route, body_for(route, field, value))
        assert status == 200 or 400 <= status < 500, (value, answer)
        if status != 200:
            message = answer["error"]["message"]
            assert (
                field in message
                or "prompt" in message
                or "text" in message
                or "input_ids" in message
            ), message
    assert engine.loaded.engine.failure is None and engine.greedy() == before


REFUSED: dict[str, list[Any]] = {
    "temperature": ["x", [], {}, True, -1, 2**63, 1e308],
    "top_k": ["x", 1.5, 0, -2, True],
    "stop": [[5], [True], [{}], 5, {}],
    "stop_token_ids": ["x", [1.5], [True], [-1]],
    "sampling_seed": [-0.5, "", [], 2**63],
    "max_new_tokens": ["5", 1.5, True, -1],
    "ignore_eos": [0, 1, "true"],
    "logit_bias": [[], "x", {"a": 1}, {"1": "x"}, {"1": 1e300}, {"-1": 1}],
    "n": [200_000, 0, True, "2"],
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in REFUSED.items() for v in values]
)
def test_wrong_sampling_parameters_are_refused(engine: Served, field: str, value: Any) -> None:
    status, answer = engine.ask("/generate", body_for("/generate", field, value))
    assert status == 400 and f"sampling_params.{field}" in answer["error"]["message"], answer


CONTROL = {
    "/pause_generation": ("mode",),
    "/abort_request": ("rid", "abort_all"),
    "/update_weights_from_tensor": (
        "load_format",
        "buffer",
        "tensors",
        "weight_version",
    ),
    "/init_weights_update_group": (
        "master_address",
        "master_port",
        "rank_offset",
        "world_size",
        "group_name",
    ),
    "/update_weights_from_distributed": (
        "names",
        "dtypes",
        "shapes",
        "group_name",
        "weight_version",
        "load_format",
    ),
    "/destroy_weights_update_group": ("group_name",),
    "/update_weights_from_disk": ("model_path", "weight_version"),
    "/update_weight_version": ("new_version", "abort_all_requests"),
    "/get_weights_by_name": ("name", "truncate_size"),
    "/weights_checker": ("action",),
    "/release_memory_occupation": ("tags",),
    "/resume_memory_occupation": ("tags",),
}


@pytest.mark.parametrize("route", CONTROL)
def test_control_calls_answer_wrong_types_with_400(engine: Served, route: str) -> None:
    before = engine.greedy()
    for field, value in itertools.product(CONTROL[route], WRONG):
        body = {field: value}
        if route == "/get_weights_by_name" and field == "truncate_size":
            body["name"] = "model.norm.weight"
        status, answer = engine.ask(route, body)
        assert status in (200, 400), (body, status, answer)
    for path in ("/continue_generation", "/resume_memory_occupation"):
        assert engine.ask(path, {})[0] == 200
    engine.ask("/update_weight_version", {"new_version": "default"})
    assert engine.greedy() == before


def test_a_flat_bucket_whose_tensors_would_not_be_aligned_is_refused(engine: Served) -> None:
    body = {"names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[3], [2]]}
    status, answer = engine.ask(
        "/update_weights_from_distributed", {**body, "load_format": "flattened_bucket"}
    )
    assert status == 400 and "'b' would" in answer["error"]["message"], answer
    status, answer = engine.ask(
        "/update_weights_from_distributed", {**body, "load_format": "sorted"}
    )
    assert status == 400 and "load_format" in answer["error"]["message"], answer


NO_OBJECTS = [
    b"{",
    b"[]",
    b"5",
    b"null x",
    b'{"a":' * 5000,
    b"\xff\xfe",
    b'{"text": NaN}',
    b'{"text": "\\ud800"}',
]


@pytest.mark.parametrize("raw", NO_OBJECTS)
def test_bodies_that_are_no_json_object(engine: Served, raw: bytes) -> None:
    assert engine.ask("/generate", raw)[0] == 400


# --- requests that take long or much
# ---------------------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {"chat_template": "{{ 'a' * 20000000 }}"},
        {"tokenize": True},
        {"max_length": 1},
        {"messages": []},
    ],
)
def test_a_request_brings_no_template(engine: Served, variables: dict[str, Any]) -> None:
    body = {**body_for("/v1/chat/completions", "n", 1), "chat_template_kwargs": variables}
    status, answer = engine.ask("/v1/chat/completions", body)
    assert status == 400 and next(iter(variables)) in answer["error"]["message"]


def test_variables_of_the_models_template_are_passed_on(engine: Served) -> None:
    body = {
        **body_for("/v1/chat/completions", "n", 1),
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert engine.ask("/v1/chat/completions", body)[0] == 200


@pytest.mark.parametrize(
    ("route", "prompt", "asked"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
            {"logprobs": True},
        ),
        ("/v1/completions", {"prompt": "Hi"}, {"logprobs": 2}),
    ],
)
def test_a_stream_of_an_openai_route_has_the_log_probs(
    engine: Served, route: str, prompt: dict[str, Any], asked: dict[str, Any]
) -> None:
    body = {**prompt, **asked, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    # a prompt from the cache is computed in another shape, with other last bits
    engine.ask("/flush_cache")
    whole = engine.ask(route, body)[1]["choices"][0]["logprobs"]
    engine.ask("/flush_cache")
    text = engine.ask(route, {**body, "stream": True})[1]
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert len(parts) > 1
    for name, values in whole.items():
        assert [value for part in parts for value in part[name]] == values and len(values) == 5
    without = engine.ask(route, {**prompt, "max_tokens": 2, "stream": True})[1]
    assert '"logprobs":null' in without


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_of_an_openai_route_ends_with_the_token_counts_if_asked(
    engine: Served, route: str
) -> None:
    body = {**body_for(route, "n", 2), "ignore_eos": True, "max_tokens": 5}
    whole = engine.ask(route, body)[1]["usage"]
    text = engine.ask(route, {**body, "stream": True, "stream_options": {"include_usage": True}})[1]
    *parts, last = [
        json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")
    ]
    assert last["usage"] == whole and last["choices"] == [] and whole["completion_tokens"] == 10
    assert all(part["choices"] and "usage" not in part for part in parts)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("echo", True), ("suffix", "end"), ("response_format", {"type": "json_object"}), ("regex", "[0-9]+"),
        ("json_schema", "{}"),
    ],
)  # fmt: skip
def test_what_the_openai_routes_cannot_do_is_refused(
    engine: Served, field: str, value: Any
) -> None:
    """A client that asks for JSON must not get any other text."""
    for route in ("/v1/chat/completions", "/v1/completions"):
        status, answer = engine.ask(route, body_for(route, field, value))
        assert status == 400 and f"{field} is" in answer["error"]["message"]
        assert engine.ask(route, body_for(route, "response_format", {"type": "text"}))[0] == 200


def test_a_text_far_beyond_the_context_is_not_tokenised(
    engine: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised: list[str] = []
    tokenizer = engine.loaded.tokenizer

    def counted(text: str, **options: Any) -> Any:
        tokenised.append(text)
        return tokenizer(text, **options)

    monkeypatch.setattr(engine.loaded, "tokenizer", counted)
    for text, status in (("a" * 16 * 512, 400), ("a" * (16 * 512 + 1), 400), ("abc", 200)):
        assert (
            engine.ask("/generate", {"text": text, "sampling_params": {"max_new_tokens": 1}})[0]
            == status
        )
    assert [len(text) for text in tokenised] == [16 * 512, 3]


def test_a_batch_with_one_that_cannot_fit_leaves_nothing_running(engine: Served) -> None:
    body = {
        "input_ids": [[20, 21], [20] * 600],
        "sampling_params": {"max_new_tokens": 500, "ignore_eos": True},
    }
    status, answer = engine.ask("/generate", body)
    assert status == 400 and "600 tokens" in answer["error"]["message"]
    assert engine.greedy()
    assert not engine.loaded.engine.scheduler.running and not engine.loaded.engine.scheduler.waiting


def test_a_full_queue_answers_503(engine: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.plugins.embedded.engine.MAX_WAITING", 0)
    status, answer = engine.ask("/generate", body_for("/generate", "n", 1))
    assert status == 503 and "waiting" in answer["error"]["message"]


def test_the_engine_answers_others_while_it_tokenises_a_long_text(
    engine: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer returns only after other requests are answered: on the event loop, it would
    never return.
    """
    begun, answered = threading.Event(), threading.Event()
    tokenizer = engine.loaded.tokenizer

    def slow(text: str, **options: Any) -> Any:
        if len(text) > 1000:
            begun.set()
            assert answered.wait(30)
        return tokenizer(text, **options)

    monkeypatch.setattr(engine.loaded, "tokenizer", slow)
    with ThreadPoolExecutor() as pool:
        long = pool.submit(
            engine.ask, "/generate", {"text": "a" * 5000, "sampling_params": {"max_new_tokens": 1}}
        )
        assert begun.wait(30)
        assert engine.ask("/health", method="GET")[0] == 200
        assert (
            engine.ask("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 1}})[0]
            == 200
        )
        assert not long.done()
        answered.set()
        assert long.result()[0] == 400, "5,000 tokens do not fit"


def test_joins_that_nobody_answers_delay_no_other_request(
    engine: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six joins of groups at a dead address took all threads that read requests, for two
    minutes.
    """
    waiting, given_up = threading.Semaphore(0), threading.Event()

    def join(*arguments: Any) -> Any:
        waiting.release()
        assert given_up.wait(30)
        raise RuntimeError("nobody is there")

    monkeypatch.setattr(routes_weights, "join_group", join)
    body = {
        "master_address": "127.0.0.1",
        "master_port": 9,
        "rank_offset": 0,
        "world_size": 2,
        "backend": "gloo",
    }
    bodies = [{**body, "group_name": f"group {i}"} for i in range(routes_weights.MAX_GROUPS + 1)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        joins = [pool.submit(engine.ask, "/init_weights_update_group", one) for one in bodies[:-1]]
        assert all(waiting.acquire(timeout=30) for _ in joins)
        status, answer = engine.ask("/init_weights_update_group", bodies[-1])
        assert status == 400 and "process groups" in answer["error"]["message"]
        text = {"text": "a" * 5000, "sampling_params": {"max_new_tokens": 1}}  # read by a thread
        assert (
            engine.ask("/generate", text)[0] == 400
            and engine.ask("/health", method="GET")[0] == 200
        )
        assert not any(join.done() for join in joins)
        given_up.set()
        assert {join.result()[0] for join in joins} == {400}


# --- images
# ----------------------------------------------------------------------------------------


def png(width: int, height: int) -> str:
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (width, height)).save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode()


@pytest.mark.parametrize(
    "item",
    [
        "file:///dev/zero",
        "file:/etc/hosts",
        "/etc/hosts.x",
        "http://127.0.0.1:1/x",
        "https://x/",
        "ftp://x",
    ],
)
def test_images_by_url_and_path_are_refused(item: str) -> None:
    with pytest.raises(BadRequest, match="base64 or data: URLs"):
        load_image(item)


def test_images_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        load_image(png(4, 4)).size
        == load_image({"url": f"data:image/png;base64,{png(4, 4)}"}).size
        == (4, 4)
    )
    monkeypatch.setattr(images, "MAX_PIXELS", 15)
    with pytest.raises(BadRequest, match="4 x 4 pixels"):
        load_image(png(4, 4))
    monkeypatch.setattr(images, "MAX_BYTES", 8)
    with pytest.raises(BadRequest, match="8 bytes"):
        load_image(png(4, 4))


@pytest.mark.parametrize(
    "item", [5, None, [], {}, {"url": 5}, "data:", "data:x", "bm90IGFuIGltYWdl", "%%%", "\ud800"]
)
def test_what_is_no_image(item: Any) -> None:
    with pytest.raises(BadRequest):
        load_image(item)


CHAT_ROUTE, COMPLETIONS_ROUTE = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        (CHAT_ROUTE, "response_format", {"type": "json_object"}),
        (
            CHAT_ROUTE,
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
        ),
        (CHAT_ROUTE, "regex", "[0-9]+"),
        (COMPLETIONS_ROUTE, "json_schema", "{}"),
        (COMPLETIONS_ROUTE, "ebnf", "root ::= 'a'"),
        (COMPLETIONS_ROUTE, "echo", True),
        (COMPLETIONS_ROUTE, "suffix", "end"),
    ],
)
def test_an_openai_route_refuses_what_it_would_leave_out(
    engine: Served, route: str, field: str, value: Any
) -> None:
    """As /generate does. Otherwise a client that asked for JSON would get any text, with status
    200.
    """
    status, answer = engine.ask(route, body_for(route, field, value))
    assert status == 400 and f"{field} is" in answer["error"]["message"], answer


@pytest.mark.parametrize(
    ("field", "value"), [("response_format", {"type": "text"}), ("echo", False), ("suffix", None)]
)
def test_an_openai_route_takes_the_values_that_change_nothing(
    engine: Served, field: str, value: Any
) -> None:
    assert engine.ask(COMPLETIONS_ROUTE, body_for(COMPLETIONS_ROUTE, field, value))[0] == 200


def test_an_openai_route_has_a_smallest_number_of_tokens(engine: Served) -> None:
    ends = list(range(5, 250))  # without min_tokens, the first token would be one of these
    body = {"prompt": "hi", "max_tokens": 6, "stop_token_ids": ends, "seed": 3}
    assert engine.ask(COMPLETIONS_ROUTE, body)[1]["usage"]["completion_tokens"] < 5
    assert (
        engine.ask(COMPLETIONS_ROUTE, {**body, "min_tokens": 5})[1]["usage"]["completion_tokens"]
        >= 5
    )
    status, answer = engine.ask(COMPLETIONS_ROUTE, {**body, "min_tokens": 7})
    assert status == 400 and "min_new_tokens" in answer["error"]["message"]


def test_the_usage_counts_the_prompt_of_several_samples_once(engine: Served) -> None:
    body = {"prompt": ["hi", "hello"], "max_tokens": 2, "ignore_eos": True}
    one, three = (engine.ask(COMPLETIONS_ROUTE, {**body, "n": n})[1]["usage"] for n in (1, 3))
    assert three["prompt_tokens"] == one["prompt_tokens"] == 7
    assert three["completion_tokens"] == 12 and three["total_tokens"] == 19


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_context(engine: Served) -> None:
    """As with SGLang, and not to the default of /generate, which would cut answers off."""
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": True}
    usage = engine.ask(CHAT_ROUTE, body)[1]["usage"]
    assert usage["total_tokens"] == engine.loaded.context_len


@pytest.mark.parametrize("field", ["audio_data", "video_data", "custom_logit_processor"])
def test_what_would_change_a_response_and_is_not_read_is_refused(
    engine: Served, field: str
) -> None:
    """The model would answer as if a prompt had no video."""
    status, answer = engine.ask("/generate", body_for("/generate", field, ["data:,x"]))
    assert status == 400 and f"{field} is" in answer["error"]["message"], answer
    assert engine.ask("/generate", body_for("/generate", field, None))[0] == 200
