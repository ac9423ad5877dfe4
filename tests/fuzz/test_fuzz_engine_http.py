"""Random bodies for every route of the embedded engine: an answer or a 4xx, and afterwards
everything as before.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from engine_parts import save_tiny_llama
from odd_values import numbers, value
from served_engine import Served, served

CHUNKS = 10
SAMPLING = [
    "max_new_tokens",
    "min_new_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "logit_bias",
    "sampling_seed",
    "n",
    "json_schema",
    "unknown",
]
FIELDS: dict[str, list[str]] = {
    "/generate": [
        "text",
        "input_ids",
        "rid",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "image_data",
        "return_text_in_logprobs",
        "return_top_p_token_ids",
        "stream",
        "weight_version_plan",
        "input_embeds",
    ],
    "/v1/chat/completions": [
        "messages",
        "tools",
        "chat_template_kwargs",
        "temperature",
        "top_p",
        "stop",
        "logit_bias",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "seed",
        "logprobs",
        "top_logprobs",
        "stream",
        "model",
    ],
    "/v1/completions": [
        "prompt",
        "temperature",
        "top_k",
        "stop",
        "n",
        "max_tokens",
        "seed",
        "logprobs",
        "stream",
        "model",
    ],
    "/abort_request": ["rid", "abort_all"],
    "/pause_generation": ["mode"],
    "/update_weights_from_tensor": [
        "load_format",
        "buffer",
        "tensors",
        "weight_version",
        "serialized_named_tensors",
    ],
    "/update_weights_from_distributed": ["names", "dtypes", "shapes", "group_name"],
    "/update_weights_from_disk": ["model_path", "weight_version"],
    "/update_weight_version": ["new_version", "abort_all_requests"],
    "/get_weights_by_name": ["name", "truncate_size"],
    "/weights_checker": ["action"],
    "/destroy_weights_update_group": ["group_name"],
}
GOOD: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [20, 21, 22], "sampling_params": {"max_new_tokens": 3}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(save_tiny_llama(tmp_path_factory.mktemp("fuzzed"))) as one:
        yield one


def finite(item: Any) -> Any:
    """JSON holds neither NaN nor infinity, and orjson no number of more than 64 bits."""
    if isinstance(item, float) and not math.isfinite(item):
        return 1e308
    if isinstance(item, list):
        return [finite(one) for one in item]
    return {key: finite(one) for key, one in item.items()} if isinstance(item, dict) else item


def request(random_: random.Random) -> tuple[str, Any]:
    route = random_.choice([*GOOD, *GOOD, *GOOD, *FIELDS])
    body: Any = json.loads(json.dumps(GOOD.get(route, {})))
    for _ in range(random_.choice((1, 1, 2, 3))):
        body[random_.choice(FIELDS[route])] = finite(value(random_))
    if route == "/generate" and random_.random() < 0.5:
        sampling = {"max_new_tokens": 3, random_.choice(SAMPLING): finite(value(random_))}
        body["sampling_params"] = random_.choice((sampling, sampling, [sampling]))
    if route == "/generate" and random_.random() < 0.2:
        body["input_ids"] = [[20, 21], [22]]
    return route, random_.choice(
        (body, body, body, body, finite(value(random_)), b"{" * 50, b"\xff")
    )


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_requests(engine: Served, chunk: int) -> None:
    before = engine.greedy()
    for case in numbers(chunk, CHUNKS):
        random_ = random.Random(f"http {case}")
        route, body = request(random_)
        status, answer = engine.ask(route, body)
        assert status == 200 or 400 <= status < 500, (case, route, body, status, answer)
        if route in ("/pause_generation", "/weights_checker"):
            engine.ask("/continue_generation", {})
        if (
            route == "/weights_checker"
            and status == 200
            and isinstance(body, dict)
            and "reset" in str(body.get("action"))
        ):
            engine.ask(
                "/update_weights_from_disk", {"model_path": engine.loaded.options.model_path}
            )
    loaded = engine.loaded.engine
    engine.ask("/update_weight_version", {"new_version": "default"})
    assert loaded.failure is None and loaded.scheduler.alone is None
    assert (
        engine.greedy() == before and not loaded.scheduler.running and not loaded.scheduler.waiting
    )
