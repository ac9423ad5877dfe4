"""The OpenAI routes ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``, as far as
clients need them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Literal

from aiohttp import web

from slime.plugins.embedded import fields
from slime.plugins.embedded.fields import BadRequest, body_of, json_answer
from slime.plugins.embedded.protocol import (
    CONSTRAINTS,
    SAMPLING_CHECKS,
    GenerateBody,
    parse_generate,
    parse_sampling_params,
)
from slime.plugins.embedded.routes_generate import (
    answers_as_they_come,
    check_length,
    encode,
    in_thread,
    prepare,
    run_all,
    send_events,
)  # fmt: skip
from slime.plugins.embedded.sequence import Answer
from slime.plugins.embedded.served import SERVED, Served

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["chat.completion", "text_completion"]
routes = web.RouteTableDef()
_NOT_IN_OPENAI = {
    "max_new_tokens",
    "min_new_tokens",
    "sampling_seed",
    "spaces_between_special_tokens",
}
_SAMPLING = SAMPLING_CHECKS.keys() - _NOT_IN_OPENAI
_NOT_SUPPORTED = (*CONSTRAINTS, "echo", "suffix")
_REASONS = {"stop": "stop", "length": "length", "abort": "abort"}


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    loaded = request.app[SERVED]
    body = await body_of(request)
    messages = fields.need(body, "messages", _messages)
    tools = fields.take(body, "tools", fields.list_of(fields.json_object, 4096), None)
    variables = fields.take(body, "chat_template_kwargs", _template_variables, {})
    if loaded.tokenizer.chat_template is None:
        raise BadRequest("this model has no chat template; use /v1/completions")
    # Before rendering, so that a wrong parameter is refused early.
    native = native_body(body, loaded.vocab_size, loaded.context_len)
    prompt = await in_thread(_render, loaded.tokenizer, messages, tools, variables)
    check_length(loaded, prompt)
    ids = await encode(loaded, prompt, add_special_tokens=False)
    return await _complete(request, loaded, body, {**native, "input_ids": ids}, "chat.completion")


_NOT_FOR_TEMPLATES = {
    "messages",
    "tools",
    "conversation",
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
}
_NOT_FOR_TEMPLATES |= {
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
}
_NOT_FOR_TEMPLATES |= {"tokenizer_kwargs"}


def _messages(value: object, name: str) -> list[dict[str, object]]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list with at least one message")
    messages = fields.list_of(fields.json_object, 65536)(value, name)
    for index, message in enumerate(messages):
        if message.get("role") is None:
            raise BadRequest(f"messages[{index}].role is missing")
        fields.text(64)(message["role"], f"messages[{index}].role")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise fields.refuse(
                f"messages[{index}].content", "must be a string or a list of parts", content
            )
    return messages


def _template_variables(value: object, name: str) -> dict[str, object]:
    """Check the variables for the model's chat template, such as ``enable_thinking``.

    A request must not contain a template, because a template is a program, nor options for
    tokenization.
    """
    variables = fields.json_object(value, name)
    for key in variables:
        if key in _NOT_FOR_TEMPLATES:
            raise BadRequest(
                f"{name}.{key} is not allowed in a request, only variables of the model's chat "
                "template"
            )
    return variables


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, object]],
    tools: list[dict[str, object]] | None,
    variables: Mapping[str, object],
) -> str:
    """Return the text of the prompt.

    Raises:
        BadRequest: The template cannot render these messages.
    """
    options = {"add_generation_prompt": True, **variables}
    # messages and variables of a client have any type
    render: Callable[..., object] = tokenizer.apply_chat_template
    try:
        return str(render(messages, tools=tools, tokenize=False, **options))
    except Exception as error:  # a template may raise any exception for the input of a client
        raise BadRequest(f"the model's chat template rejected these messages: {error}") from error


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several, each given as text or token ids."""
    loaded = request.app[SERVED]
    body = await body_of(request)
    prompt = body.get("prompt")
    if not prompt or not isinstance(prompt, str | list):
        raise BadRequest("prompt must be a text or a list of token ids")
    first = prompt[0] if isinstance(prompt, list) else prompt
    key = "text" if isinstance(first, str) else "input_ids"
    native = {**native_body(body, loaded.vocab_size, 128), key: prompt}
    return await _complete(request, loaded, body, native, "text_completion")


_COUNT = fields.whole(0, 2**31 - 1)


def native_body(body: Mapping[str, object], vocab_size: int, most_tokens: int) -> dict[str, object]:
    """Convert a body to a body of ``/generate`` without the prompt.

    Args:
        most_tokens: The limit for a body without one.

    Raises:
        BadRequest: A value is wrong, or the body asks for something that would be left out.
    """
    # A wish that would silently be left out is refused.
    wanted_form = fields.take(body, "response_format", fields.json_object, {})
    left_out = [name for name in _NOT_SUPPORTED if body.get(name)]
    if wanted_form.get("type", "text") != "text":
        left_out.append("response_format")
    if left_out:
        raise BadRequest(f"{left_out[0]} is not supported by this engine")
    # Sampling parameters have the same names, but for the limits and the seed.
    sampling = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    # for errors with the names that the client used
    parse_sampling_params(sampling, vocab_size, where="")
    limits = [
        fields.take(body, name, _COUNT, 0) for name in ("max_completion_tokens", "max_tokens")
    ]
    sampling["max_new_tokens"] = next((limit for limit in limits if limit), most_tokens)
    sampling["min_new_tokens"] = fields.take(body, "min_tokens", _COUNT, 0)
    sampling["sampling_seed"] = fields.take(body, "seed", fields.whole(-(2**63), 2**63 - 1), None)
    # logprobs is a switch in chats and a number of alternatives in completions.
    wanted = body.get("logprobs")
    most = fields.whole(0, vocab_size)
    if wanted is not None and type(wanted) is not bool:
        most(wanted, "logprobs")
    count = wanted if type(wanted) is int else 0
    return {
        "sampling_params": sampling,
        "return_logprob": bool(wanted),
        "top_logprobs_num": fields.take(body, "top_logprobs", most, 0) or count,
        "return_text_in_logprobs": True,
        "stream": fields.take(body, "stream", fields.truth, False),
        "lora_path": body.get("lora_path"),
    }


async def _complete(
    request: web.Request,
    loaded: Served,
    body: Mapping[str, object],
    native: Mapping[str, object],
    kind: Kind,
) -> web.StreamResponse:
    model = fields.take(body, "model", fields.text(4096), "") or loaded.model_path
    parsed = parse_generate(native, loaded.vocab_size)
    await prepare(loaded, parsed)
    head = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": model}
    if parsed.stream:
        options = fields.take(body, "stream_options", fields.json_object, {})
        with_usage = fields.take(options, "include_usage", fields.truth, False)
        return await send_events(
            request, _deltas(loaded, parsed, head, kind, with_usage), index=False
        )
    answers = await run_all(loaded, parsed.requests)
    choices = [_choice(index, answer, kind) for index, answer in enumerate(answers)]
    usage = _usage(answers, parsed.requests[0].params.n)
    return json_answer({**head, "object": kind, "choices": choices, "usage": usage})


def _choice(index: int, answer: Answer, kind: Kind) -> dict[str, object]:
    meta = answer["meta_info"]
    finish = meta["finish_reason"]
    choice: dict[str, object] = {
        "index": index,
        "finish_reason": _REASONS[finish["type"]],
        "matched_stop": finish.get("matched"),
        "logprobs": _logprobs(answer, kind),
    }
    if kind == "chat.completion":
        return {**choice, "message": {"role": "assistant", "content": answer["text"]}}
    return {**choice, "text": answer["text"]}


def _logprobs(answer: Answer, kind: Kind) -> dict[str, object] | None:
    meta = answer["meta_info"]
    if "output_token_logprobs" not in meta:
        return None
    entries = meta["output_token_logprobs"]
    tops = meta.get("output_top_logprobs") or [[] for _ in entries]
    if kind == "chat.completion":
        content = [
            {
                "token": text,
                "logprob": value,
                "top_logprobs": [{"token": t, "logprob": v} for v, _, t in top],
            }
            for (value, _, text), top in zip(entries, tops, strict=True)
        ]
        return {"content": content}
    return {
        "tokens": [text for _, _, text in entries],
        "token_logprobs": [value for value, _, _ in entries],
        "top_logprobs": [{t: v for v, _, t in top} for top in tops],
    }


def _usage(answers: list[Answer], samples: int) -> dict[str, int]:
    """Return the numbers of tokens. The samples of a prompt follow one another, and the prompt is
    counted once.
    """
    prompt = sum(answer["meta_info"]["prompt_tokens"] for answer in answers[::samples])
    output = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


async def _deltas(
    loaded: Served, parsed: GenerateBody, head: Mapping[str, object], kind: Kind, with_usage: bool
) -> AsyncIterator[tuple[int, dict[str, object]]]:
    """Yield the index of a request and a chunk with its new text, in OpenAI's format, and at the
    end the token counts if ``with_usage`` is set."""
    chat = kind == "chat.completion"
    head = {**head, "object": f"{kind}.chunk" if chat else kind}
    ends: dict[int, Answer] = {}
    async for index, answer in answers_as_they_come(loaded, parsed.requests):
        new = answer["text"]
        finish = answer["meta_info"]["finish_reason"]
        piece: dict[str, object] = (
            {"delta": {"role": "assistant", "content": new}} if chat else {"text": new}
        )
        reason = None if finish is None else _REASONS[finish["type"]]
        if finish is not None:
            ends[index] = answer
        choice = {
            "index": index,
            "finish_reason": reason,
            "logprobs": _logprobs(answer, kind),
            **piece,
        }
        yield index, {**head, "choices": [choice]}
    if with_usage:
        yield (
            0,
            {
                **head,
                "choices": [],
                "usage": _usage([ends[i] for i in sorted(ends)], parsed.requests[0].params.n),
            },
        )


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    loaded = request.app[SERVED]
    card = {"id": loaded.model_path, "object": "model", "created": 0, "owned_by": "slime"}
    return json_answer({"object": "list", "data": [{**card, "max_model_len": loaded.context_len}]})
