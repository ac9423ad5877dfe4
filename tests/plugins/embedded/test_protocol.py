"""Bodies of ``/generate``: every accepted form, and a sentence for every other one."""

from __future__ import annotations

from typing import Any

import pytest

from slime.plugins.embedded.protocol import (
    MAX_SCORES,
    SamplingParams,
    check_scores,
    parse_generate,
    parse_sampling_params,
)
from slime.plugins.http.server import BadRequest

VOCAB = 100


def parse(**body: Any) -> Any:
    return parse_generate(body, VOCAB)


def test_defaults_are_sglangs() -> None:
    parsed = parse(text="hi")
    (single,) = parsed.requests
    assert parsed.is_single and not parsed.stream and parsed.texts == ["hi"]
    assert single.params == SamplingParams() and single.params.max_new_tokens == 128
    assert not single.return_logprob and single.logprob_start_len == -1


def test_nulls_mean_defaults() -> None:
    assert (
        parse_sampling_params({"stop": None, "top_k": None, "temperature": None}, VOCAB)
        == SamplingParams()
    )


def test_stop_forms() -> None:
    params = parse_sampling_params({"stop": "x", "stop_token_ids": [3, 4]}, VOCAB)
    assert params.stop == ("x",) and params.stop_token_ids == {3, 4}
    assert parse_sampling_params({"stop": ["a", "b"]}, VOCAB).stop == ("a", "b")


def test_batch_spreads_lists_and_repeats_scalars() -> None:
    parsed = parse(
        input_ids=[[1], [2, 3]],
        rid="r",
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        return_logprob=[True, False],
        top_logprobs_num=2,
    )
    assert [single.rid for single in parsed.requests] == ["r_0", "r_1"] and not parsed.is_single
    assert [single.params.max_new_tokens for single in parsed.requests] == [1, 2]
    assert [single.return_logprob for single in parsed.requests] == [True, False]
    assert [single.top_logprobs_num for single in parsed.requests] == [2, 2]


def test_n_repeats_the_prompt_with_seeds_of_its_own() -> None:
    parsed = parse(
        input_ids=[[1], [2]], sampling_params={"n": 3, "sampling_seed": 10}, rid=["a", "b"]
    )
    assert [single.input_ids for single in parsed.requests] == [[1]] * 3 + [[2]] * 3
    assert [single.params.sampling_seed for single in parsed.requests] == [10, 11, 12] * 2
    assert len({single.rid for single in parsed.requests}) == 6 and not parsed.is_single


def test_greedy_and_filtered() -> None:
    assert SamplingParams(temperature=0.0).greedy and SamplingParams(top_k=1).greedy
    assert (
        SamplingParams(top_p=0.5).filtered
        and not SamplingParams(top_p=0.5, temperature=0.0).filtered
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "text or input_ids"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [[]]}, "empty"),
        ({"input_ids": [1, 100]}, r"input_ids\[1\] is 100"),
        ({"input_ids": [1, "x"]}, "input_ids"),
        ({"input_ids": [1, True]}, "input_ids"),
        ({"text": [1]}, "text must"),
        ({"text": []}, "of prompts"),
        (
            {"text": "a", "sampling_params": {"temperatur": 1}},
            "unknown sampling_params: temperatur",
        ),
        ({"text": "a", "sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ({"text": "a", "sampling_params": {"top_k": 0}}, "top_k must be -1"),
        ({"text": "a", "sampling_params": {"temperature": float("inf")}}, "temperature"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}},
            "min_new_tokens",
        ),
        ({"text": "a", "sampling_params": {"logit_bias": {"100": 1}}}, "logit_bias"),
        ({"text": "a", "sampling_params": {"n": 0}}, "n must"),
        ({"text": ["a", "b"], "rid": ["x"]}, r"rid.*2 prompts"),
    ],
)
def test_errors_say_what_is_wrong(body: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        parse_generate(body, VOCAB)


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [1] * 500, "top_logprobs_num": 49152, "logprob_start_len": 0},
        {"input_ids": [1] * 500, "token_ids_logprob": [7] * 49152, "logprob_start_len": 0},
        {"input_ids": [1], "top_logprobs_num": 49152},
        {"input_ids": [[1]] * 100, "top_logprobs_num": 500},
        {"input_ids": [1], "top_logprobs_num": 500, "sampling_params": {"n": 100}},
    ],
)
def test_log_probs_that_would_hold_up_the_engine_are_refused(body: dict[str, Any]) -> None:
    requests = parse_generate(body | {"return_logprob": True}, 49152).requests
    with pytest.raises(BadRequest, match=f"at most {MAX_SCORES} are computed"):
        check_scores(requests, 32768)


def test_log_probs_of_a_long_response_are_computed() -> None:
    body = {"input_ids": [1] * 32768, "top_logprobs_num": 64, "logprob_start_len": 0}
    check_scores(
        parse_generate(body | {"sampling_params": {"max_new_tokens": 2**31 - 1}}, 49152).requests,
        32768,
    )
