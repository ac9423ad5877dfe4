"""What the API's bodies say, as slime's data, and slime's results as the API's answers; in JSON, or as
protocol buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessages

from slime.algorithms.token_losses import TOKEN_LOSSES
from slime.data.datum import Datum
from slime.plugins.http.server import BadRequest, json_object, list_of, take, whole

_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Text": {"tokens": (1, "bytes")},
    "Chunk": {"encoded_text": (1, "Text")},
    "Tensor": {"dense": (1, "bytes"), "dtype": (3, "int32"), "shape": (4, "int64*")},
    "Input": {"key": (1, "string"), "value": (2, "Tensor")},
    "Datum": {"model_input": (1, "Chunk*"), "loss_fn_inputs": (2, "Input*")},
    "Number": {"key": (1, "string"), "value": (2, "double")},
    "Value": {"number": (1, "double")},
    "Option": {"key": (1, "string"), "value": (2, "Value")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int64"),
        "data": (3, "Datum*"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "Number*"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "Option*"),
    },
    "Tensors": {"data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32")},
    "Field": {"key": (1, "string"), "value": (2, "Tensors")},
    "Record": {"type_tag": (1, "string"), "fields": (2, "Field*"), "num_datums": (3, "int32")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "Record*"),
        "metrics": (3, "Number*"),
    },
    "Sequence": {"stop_reason": (1, "int32"), "tokens": (2, "bytes"), "logprobs": (3, "bytes")},
    "SampleResponse": {"sequences": (1, "Sequence*"), "prompt_logprobs": (2, "bytes")},
}
"""The number and the type of the fields of the API's messages, as far as they are read and written.
A type with a star is repeated; a map is a repeated message of key and value.
"""


def _classes() -> dict[str, Any]:
    """Return the classes of the messages, by name."""
    file = FileDescriptorProto(name="slime/serve.proto", package="slime")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            is_message = kind[0].isupper()
            message.field.add(
                name=field,
                number=number,
                label="LABEL_REPEATED" if kind.endswith("*") else "LABEL_OPTIONAL",
                type="TYPE_MESSAGE" if is_message else f"TYPE_{kind.rstrip('*').upper()}",
                type_name=f".slime.{kind.rstrip('*')}" if is_message else None,
            )
    return {name.removeprefix("slime."): made for name, made in GetMessages([file]).items()}


CLASSES = _classes()
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
    """
    try:
        request = CLASSES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise BadRequest(f"the body is no ForwardBackwardRequest: {error}") from error
    options = {option.key: option.value for option in request.loss_fn_config}
    for option in request.loss_fn_config_v2:
        if not option.value.HasField("number"):
            raise BadRequest(
                f"loss_fn_config {option.key!r} is a text, but this server takes only numbers"
            )
        options[option.key] = option.value.number
    loss = request.loss_fn
    if loss not in TOKEN_LOSSES:
        raise BadRequest(
            f"the loss {loss!r} is not served; these are: {', '.join(TOKEN_LOSSES)}, and functions "
            "of log-probs (forward_backward_custom)"
        )
    if wrong := sorted(options.keys() - TOKEN_LOSSES[loss][1].keys()):
        raise BadRequest(f"the loss {loss} has no {', '.join(wrong)} in loss_fn_config")
    data = [_datum(one, place, loss) for place, one in enumerate(request.data)]
    if not data:
        raise BadRequest("there are no data")
    return Batch(request.model_id, request.seq_id, loss, options, data, not request.forward_only)


def _datum(given: Message, place: int, loss: str) -> Datum:
    """Return a datum, whose scored tokens are all but the first.

    The API gives inputs and targets of the same length. slime scores each token of one sequence
    given those before it, so the targets must be the inputs moved by one.
    """
    where = f"datum {place}"
    inputs: list[int] = []
    for chunk in given.model_input:
        if not chunk.HasField("encoded_text"):
            raise BadRequest(f"{where} has an image or audio, which this server does not train on")
        inputs += _numbers(chunk.encoded_text.tokens, "<i4", where)
    tensors = {one.key: _tensor(one.value, where) for one in given.loss_fn_inputs}
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


def _tensor(given: Message, where: str) -> list[float]:
    if not given.HasField("dense") or len(given.shape) > 1:
        raise BadRequest(f"{where} has a sparse tensor or one of several dimensions: not served")
    dtype = _DTYPES.get(given.dtype)
    if dtype is None:
        raise BadRequest(f"{where} has a tensor of an unknown dtype")
    return _numbers(given.dense, dtype, where)


def _numbers(data: bytes, dtype: str, where: str) -> list[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise BadRequest(f"{where} has a tensor that is cut off")
    numbers: list[Any] = np.frombuffer(data, dtype).tolist()
    return numbers


def batch_answer(metrics: Mapping[str, float], log_probs: Sequence[np.ndarray]) -> bytes:
    """Return a ``ForwardBackwardOutput`` with the log-probs of each datum, float32."""
    sizes = np.cumsum([0, *(4 * len(x) for x in log_probs)])
    tensors = {
        "data": np.concatenate(log_probs).astype("<f4").tobytes(),
        "offsets": sizes.astype("<i8").tobytes(),
        "dtype": _FLOAT,
    }
    kind = "TorchLossReturn"
    record = {
        "type_tag": kind,
        "fields": [{"key": "logprobs", "value": tensors}],
        "num_datums": len(log_probs),
    }
    sums = [{"key": f"{name}:sum", "value": value} for name, value in metrics.items()]
    made = CLASSES["ForwardBackwardOutput"](
        loss_fn_output_type=kind, loss_fn_outputs=[record], metrics=sums
    )
    return bytes(made.SerializeToString())


def sample_answer(answers: Sequence[Mapping[str, Any]], with_prompt: bool) -> bytes:
    """Return a ``SampleResponse`` of the engine's answers to one prompt."""
    made = CLASSES["SampleResponse"]()
    for answer in answers:
        scored = answer["meta_info"]["output_token_logprobs"]
        ended = answer["meta_info"]["finish_reason"]
        made.sequences.add(
            stop_reason=None if ended["type"] == "stop" else 1,
            tokens=np.array([one[1] for one in scored], "<i4").tobytes(),
            logprobs=np.array([one[0] for one in scored], "<f4").tobytes(),
        )
    if with_prompt:
        read = answers[0]["meta_info"]["input_token_logprobs"]
        # the first token has no log-prob, which the API tells as NaN
        values = [np.nan if one[0] is None else one[0] for one in read]
        made.prompt_logprobs = np.array(values, "<f4").tobytes()
    return bytes(made.SerializeToString())


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
