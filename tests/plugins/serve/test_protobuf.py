"""Bodies and answers, beside bytes worked by hand, and bytes that are no message."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_parts import batch, datum, field

from slime.plugins.http.server import BadRequest
from slime.plugins.serve.messages import batch_answer, read_batch, sample_answer, sampling_body


@pytest.mark.parametrize(
    "data",
    [b"\x08", b"\x12\x07test", b"\x0b", b"\x00\x01", b"\x08" + b"\xff" * 11, b"\x0d\x01"],
)
def test_what_is_no_message_is_told(data: bytes) -> None:
    with pytest.raises(BadRequest, match="no ForwardBackwardRequest"):
        read_batch(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for body in (data, batch("m", 1, data), batch("m", 1, datum() + data)):
        with contextlib.suppress(BadRequest, UnicodeDecodeError):
            read_batch(body)


def test_answers_have_the_bytes_of_their_messages() -> None:
    log_probs = [np.array([-1.0, -2.0], "<f4"), np.array([-3.0], "<f4")]
    values = field(1, np.array([-1, -2, -3], "<f4").tobytes())
    values += field(2, np.array([0, 8, 12], "<i8").tobytes()) + field(3, 1)
    record = field(1, "TorchLossReturn") + field(2, field(1, "logprobs") + field(2, values))
    metrics = [field(3, field(1, f"{name}:sum") + field(2, 0.5)) for name in ("loss", "kl")]
    expected = field(1, "TorchLossReturn") + field(2, record + field(3, 2)) + b"".join(metrics)
    assert batch_answer({"loss": 0.5, "kl": 0.5}, log_probs) == expected

    def answer(end: str) -> dict[str, Any]:
        meta = {"output_token_logprobs": [[-1.0, 7, None]], "finish_reason": {"type": end}}
        return {"meta_info": {**meta, "input_token_logprobs": [[None, 3, None], [-0.5, 4, None]]}}

    drawn = field(2, np.array([7], "<i4").tobytes()) + field(3, np.array([-1], "<f4").tobytes())
    expected = field(1, drawn) + field(1, field(1, 1) + drawn)
    two = [answer("stop"), answer("length")]
    assert sample_answer(two, False) == expected
    read = field(2, np.array([np.nan, -0.5], "<f4").tobytes())
    assert sample_answer(two, True) == expected + read


def test_a_request_becomes_data() -> None:
    one = datum([5, 6, 7], weights=[0.5, 2.0])
    found = read_batch(batch("model", 3, one, forward=True))
    assert (found.model, found.number, found.loss, found.learns) == (
        "model",
        3,
        "cross_entropy",
        False,
    )
    assert (found.data[0].tokens, found.data[0].weights) == ([5, 6, 7], [0.5, 2.0])
    config = field(7, field(1, "clip_high_threshold") + field(2, field(1, 1.5)))
    one = datum([5, 6, 7], advantages=[1.0, -1.0], logprobs=[-1.0, -2.0], mask=[1.0, 0.0])
    found = read_batch(batch("model", 4, one, loss="ppo") + config)
    assert found.options == {"clip_high_threshold": 1.5} and found.learns
    assert found.data[0].log_probs == [-1.0, -2.0] and found.data[0].weights == [1.0, 0.0]
    unknown = field(7, field(1, "beta") + field(2, field(1, 1.5)))
    with pytest.raises(BadRequest, match="beta"):
        read_batch(batch("model", 4, one, loss="ppo") + unknown)


def test_targets_that_are_not_the_next_tokens_are_refused() -> None:
    from serve_parts import tensor

    inputs = field(1, field(1, field(1, np.array([5, 6], "<i4").tobytes())))
    targets = field(2, field(1, "target_tokens") + field(2, tensor([9, 7], whole=True)))
    with pytest.raises(BadRequest, match="target_tokens"):
        read_batch(batch("model", 1, inputs + targets))
    # but those that weigh nothing may be anything
    masked = inputs + targets + field(2, field(1, "weights") + field(2, tensor([0.0, 1.0])))
    assert read_batch(batch("model", 1, masked)).data[0].tokens == [5, 6, 7]
    numbers = {"logprobs": [0.0, -1.0], "advantages": [0.0, 1.0]}
    for name, values in numbers.items():
        targets += field(2, field(1, name) + field(2, tensor(values)))
    assert read_batch(batch("model", 1, inputs + targets, "ppo")).data[0].tokens == [5, 6, 7]
    with pytest.raises(
        BadRequest, match="target_tokens"
    ):  # the distance counts without an advantage
        read_batch(batch("model", 1, inputs + targets, "dro"))


def test_tensors_of_two_dimensions_are_refused() -> None:

    inputs = field(1, field(1, field(1, np.array([5, 6], "<i4").tobytes())))
    values = field(1, np.array([6, 7], "<i8").tobytes()) + field(3, 2)
    for shape in (field(4, bytes([2, 1])), field(4, 2) + field(4, 1)):
        targets = field(2, field(1, "target_tokens") + field(2, values + shape))
        with pytest.raises(BadRequest, match="dimensions"):
            read_batch(batch("model", 1, inputs + targets))
    targets = field(2, field(1, "target_tokens") + field(2, values + field(4, b"\x02")))
    assert read_batch(batch("model", 1, inputs + targets)).data[0].tokens == [5, 6, 7]


def test_a_request_for_samples_becomes_the_engines() -> None:
    prompt = {"chunks": [{"tokens": [1, 2]}, {"tokens": [3], "type": "encoded_text"}]}
    params = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop": ["a", "b"]}
    body = sampling_body({"prompt": prompt, "sampling_params": params, "num_samples": 2}, "a", 7)
    assert body["input_ids"] == [1, 2, 3] and body["lora_path"] == "a"
    sent = body["sampling_params"]
    assert (sent["n"], sent["sampling_seed"], sent["max_new_tokens"]) == (2, 7, 5)
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["stop"]) == (
        0.5,
        0.9,
        3,
        ["a", "b"],
    )
    params = {"seed": 11, "stop": [4]}
    body = sampling_body({"prompt": prompt, "sampling_params": params}, None, 7)
    assert body["sampling_params"]["sampling_seed"] == 11 and "lora_path" not in body
    assert body["sampling_params"]["stop_token_ids"] == [4]
    for wrong in (
        {"prompt": {"chunks": []}},
        {"prompt": {"chunks": [{"type": "image"}]}},
        {"prompt": prompt, "num_samples": 0},
        {"prompt": prompt, "topk_prompt_logprobs": 2},
        {"prompt": prompt, "sampling_params": {"stop": [1, "a"]}},
    ):
        with pytest.raises(BadRequest):
            sampling_body(wrong, None, 7)
