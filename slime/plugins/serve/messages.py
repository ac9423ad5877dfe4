"""What the API's bodies say, as slime's data, and slime's results as the API's answers; in JSON, or in
the wire format of protocol buffers, as far as the API's messages need it.

Source of the format: https://protobuf.dev/programming-guides/encoding/. A message is read as the
values of its fields by number; who knows the message says what they mean.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.algorithms.token_losses import TOKEN_LOSSES
from slime.data.datum import Datum
from slime.plugins.http.server import BadRequest, json_object, list_of, take, whole

Value = int | bytes
"""A number, or the bytes of a string, a message, or a number of fixed size."""


class Malformed(BadRequest):
    """Bytes that are no message."""


def parse(data: bytes) -> dict[int, list[Value]]:
    """Return the values of each field, in their order.

    Raises:
        Malformed: The bytes are no message.
    """
    found: dict[int, list[Value]] = {}
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number = key >> 3
        kind = key & 7
        value: Value
        if kind == 0:
            value, position = _varint(data, position)
        elif kind in (1, 2, 5):
            size = {1: 8, 5: 4}.get(kind, 0)
            if kind == 2:
                size, position = _varint(data, position)
            value = data[position : position + size]
            position += size
            if position > len(data):
                raise Malformed("a field is longer than its message")
        else:
            raise Malformed(f"a field has the unknown wire type {kind}")
        if number == 0:
            raise Malformed("a field has the number 0")
        found.setdefault(number, []).append(value)
    return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise Malformed("a number ends too early")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), position
    raise Malformed("a number has more than ten bytes")


def message(value: Value | None) -> dict[int, list[Value]]:
    """Return the fields of a message in a field; no value is an empty message."""
    return {} if value is None else parse(raw(value))


def raw(value: Value | None) -> bytes:
    """Return the bytes of a field; no value is empty."""
    if value is None:
        return b""
    if isinstance(value, int):
        raise Malformed("a field is a number, but should have bytes")
    return value


def text(value: Value | None) -> str:
    """Return the text of a field."""
    try:
        return raw(value).decode()
    except UnicodeDecodeError as error:
        raise Malformed("a text is not UTF-8") from error


def integer(value: Value | None) -> int:
    """Return the number of a field, which may be negative; no value is 0."""
    if value is None:
        return 0
    if isinstance(value, bytes):
        raise Malformed("a field has bytes, but should be a number")
    return value - 2**64 if value >= 2**63 else value


def double(value: Value | None) -> float:
    """Return the double of a field; no value is 0."""
    data = raw(value)
    if value is not None and len(data) != 8:
        raise Malformed("a double has eight bytes")
    return struct.unpack("<d", data)[0] if data else 0.0


def last(fields: dict[int, list[Value]], number: int) -> Value | None:
    """Return the value of a field that occurs once: as everywhere, the last one counts."""
    return fields[number][-1] if number in fields else None


def field(number: int, value: int | float | bytes | str) -> bytes:
    """Return a field: a varint, a double, or bytes."""
    if isinstance(value, float):
        return _encoded(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return _encoded(number << 3) + _encoded(value)
    data = value.encode() if isinstance(value, str) else value
    return _encoded(number << 3 | 2) + _encoded(len(data)) + data


def _encoded(value: int) -> bytes:
    value &= 2**64 - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


_FLOAT = 1
_DTYPES = {1: "<f4", 2: "<i8", 3: "<i4"}
"""The numpy dtypes of the dtypes of a tensor."""
MOST_TOKENS = 1 << 20


@dataclass(frozen=True)
class Batch:
    """A request to compute a loss.

    Attributes:
        learns: Whether the gradients are added; otherwise only the log-probs are computed.
    """

    model: str
    number: int
    loss: str
    options: Mapping[str, float]
    data: list[Datum]
    learns: bool


def read_batch(body: bytes) -> Batch:
    """Read a ``ForwardBackwardRequest``.

    Raises:
        BadRequest: A field has a wrong value, or the server does not compute what it asks for.
        Malformed: The body is no message.
    """
    fields = parse(body)
    options = {
        text(last(pair, 1)): double(last(pair, 2)) for pair in map(message, fields.get(5, []))
    }
    for pair in map(message, fields.get(7, [])):
        name = text(last(pair, 1))
        value = message(last(pair, 2))
        if 1 not in value:
            raise BadRequest(
                f"loss_fn_config {name!r} is a text, but this server takes only numbers"
            )
        options[name] = double(last(value, 1))
    loss = text(last(fields, 4))
    if loss not in TOKEN_LOSSES:
        raise BadRequest(
            f"the loss {loss!r} is not served; these are: {', '.join(TOKEN_LOSSES)}, and functions "
            "of log-probs (forward_backward_custom)"
        )
    if wrong := sorted(options.keys() - TOKEN_LOSSES[loss][1].keys()):
        raise BadRequest(f"the loss {loss} has no {', '.join(wrong)} in loss_fn_config")
    data = [_datum(message(value), place, loss) for place, value in enumerate(fields.get(3, []))]
    if not data:
        raise BadRequest("there are no data")
    learns = not integer(last(fields, 6))
    return Batch(text(last(fields, 1)), integer(last(fields, 2)), loss, options, data, learns)


def _datum(fields: dict[int, list[Value]], place: int, loss: str) -> Datum:
    """Return a datum, whose scored tokens are all but the first.

    The API gives inputs and targets of the same length. slime scores each token of one sequence
    given those before it, so the targets must be the inputs moved by one.
    """
    where = f"datum {place}"
    inputs: list[int] = []
    for chunk in map(message, fields.get(1, [])):
        if 1 not in chunk:
            raise BadRequest(f"{where} has an image or audio, which this server does not train on")
        inputs += _numbers(raw(last(message(last(chunk, 1)), 1)), "<i4", where)
    tensors = {
        text(last(pair, 1)): _tensor(message(last(pair, 2)), where)
        for pair in map(message, fields.get(2, []))
    }
    targets = tensors.pop("target_tokens", None)
    if targets is None:
        raise BadRequest(f"{where} has no target_tokens")
    if not inputs or len(inputs) != len(targets) or len(inputs) > MOST_TOKENS:
        raise BadRequest(
            f"{where} has {len(inputs)} tokens and {len(targets)} target_tokens: there must be as "
            "many of both, and not 0"
        )
    others = [i for i, x in enumerate(inputs[1:]) if int(targets[i]) != x]
    known = ("weights",) if loss == "cross_entropy" else ("advantages", "logprobs", "weights")
    if unknown := sorted(tensors.keys() - {*known, "mask"}):
        raise BadRequest(f"{where} has {', '.join(unknown)}, which the loss {loss} does not take")
    tensors.setdefault("weights", tensors.pop("mask", [1.0] * len(targets)))
    for name, numbers in tensors.items():
        if len(numbers) != len(targets):
            raise BadRequest(f"{where} has {len(numbers)} {name} for {len(targets)} target_tokens")
    # Programs fill the targets of a prompt with anything, if they weigh nothing.
    factor = tensors["weights"] if loss in ("cross_entropy", "dro") else tensors.get("advantages")
    if factor is not None and any(factor[i] and tensors["weights"][i] for i in others):
        raise BadRequest(
            f"{where}: target_tokens must be the tokens of model_input moved by one, with one more "
            "at the end; this server scores no other targets"
        )
    tokens = [*inputs, int(targets[-1])]
    # One group: what data of a request have in common at their beginning is computed once.
    datum = Datum(tokens, tensors["weights"], tensors.get("advantages"), tensors.get("logprobs"), 0)
    if loss != "cross_entropy" and (datum.advantages is None or datum.log_probs is None):
        raise BadRequest(f"{where} has no advantages or no logprobs, which the loss {loss} needs")
    if problem := datum.check(place):
        raise BadRequest(problem)
    return datum


def _tensor(fields: dict[int, list[Value]], where: str) -> list[float]:
    # the sizes, packed or not: the last byte of a varint is below 128
    dimensions = sum(
        1 if isinstance(one, int) else sum(byte < 128 for byte in one) for one in fields.get(4, [])
    )
    if 1 not in fields or dimensions > 1:
        raise BadRequest(f"{where} has a sparse tensor or one of several dimensions: not served")
    dtype = _DTYPES.get(integer(last(fields, 3)))
    if dtype is None:
        raise BadRequest(f"{where} has a tensor of an unknown dtype")
    return _numbers(raw(last(fields, 1)), dtype, where)


def _numbers(data: bytes, dtype: str, where: str) -> list[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise BadRequest(f"{where} has a tensor that is cut off")
    numbers: list[Any] = np.frombuffer(data, dtype).tolist()
    return numbers


def batch_answer(metrics: Mapping[str, float], log_probs: Sequence[np.ndarray]) -> bytes:
    """Return a ``ForwardBackwardOutput`` with the log-probs of each datum, float32."""
    sizes = np.cumsum([0, *(4 * len(x) for x in log_probs)])
    tensor = (
        field(1, np.concatenate(log_probs).astype("<f4").tobytes())
        + field(2, sizes.astype("<i8").tobytes())
        + field(3, _FLOAT)
    )
    entry = field(1, "logprobs") + field(2, tensor)
    record = field(1, "TorchLossReturn") + field(2, entry) + field(3, len(log_probs))
    sums = b"".join(
        field(3, field(1, f"{name}:sum") + field(2, float(value)))
        for name, value in metrics.items()
    )
    return field(1, "TorchLossReturn") + field(2, record) + sums


def sample_answer(answers: Sequence[Mapping[str, Any]], with_prompt: bool) -> bytes:
    """Return a ``SampleResponse`` of the engine's answers to one prompt."""
    found = b""
    for answer in answers:
        scored = answer["meta_info"]["output_token_logprobs"]
        ended = answer["meta_info"]["finish_reason"]
        sequence = b"" if ended["type"] == "stop" else field(1, 1)
        sequence += field(2, np.array([one[1] for one in scored], "<i4").tobytes())
        sequence += field(3, np.array([one[0] for one in scored], "<f4").tobytes())
        found += field(1, sequence)
    if with_prompt:
        read = answers[0]["meta_info"]["input_token_logprobs"]
        # the first token has no log-prob, which the API tells as NaN
        values = [np.nan if one[0] is None else one[0] for one in read]
        found += field(2, np.array(values, "<f4").tobytes())
    return found


def sampling_body(request: Mapping[str, Any], adapter: str | None, seed: int) -> dict[str, Any]:
    """Return the body of the engine's ``/generate`` for a ``SampleRequest``.

    Args:
        adapter: The name of the adapter in the engine; None for the base model.
        seed: The seed of the first sample, if the request has none.

    Raises:
        BadRequest: A field has a wrong value, or asks for what is not served.
    """
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs",
                 "prompt_alt_tokens_k", "prompt_logprobs_last_n", "record_stability_info"):  # fmt: skip
        if request.get(name):
            raise BadRequest(f"{name} is not served")
    tokens: list[int] = []
    prompt = take(request, "prompt", json_object, {})
    for chunk in take(prompt, "chunks", list_of(json_object), [], "prompt."):
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise BadRequest("a prompt with images or audio is not served")
        tokens += chunk["tokens"]
    if not tokens:
        raise BadRequest("the prompt is empty")
    given = take(request, "sampling_params", json_object, {})
    params: dict[str, Any] = {
        "n": take(request, "num_samples", whole(1, 1024), 1),
        "sampling_seed": seed if given.get("seed") is None else given["seed"],
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if given.get("max_tokens") is not None:
        params["max_new_tokens"] = given["max_tokens"]
    for name in ("temperature", "top_p", "top_k"):
        if given.get(name) is not None:
            params[name] = given[name]
    stop = given.get("stop")
    if stop:
        words = [stop] if isinstance(stop, str) else stop
        kinds = {type(word) for word in words}
        if kinds not in ({str}, {int}):
            raise BadRequest("stop must be a text, a list of texts, or a list of token ids")
        params["stop" if kinds == {str} else "stop_token_ids"] = words
    body = {"input_ids": tokens, "sampling_params": params, "return_logprob": True}
    if request.get("prompt_logprobs"):
        body["logprob_start_len"] = 0
    if adapter is not None:
        body["lora_path"] = adapter
    return body
