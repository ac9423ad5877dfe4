"""The OpenAI routes ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``, as far as
clients need them.
"""

from __future__ import annotations

import inspect
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Literal

from aiohttp import web

from slime.plugins.embedded.protocol import (
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
from slime.plugins.http.server import (
    BadRequest,
    body_of,
    json_answer,
    json_object,
    list_of,
    need,
    string,
    take,
    truth,
    whole,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["chat.completion", "text_completion"]
routes = web.RouteTableDef()
_OTHER_NAMES = {"max_new_tokens", "min_new_tokens", "sampling_seed"}
_SAMPLING = SAMPLING_CHECKS.keys() - _OTHER_NAMES
_NOT_SUPPORTED = ("json_schema", "regex", "ebnf", "structural_tag", "echo", "suffix")


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    loaded = request.app[SERVED]
    body = await body_of(request)
    messages = need(body, "messages", list_of(_message, least=1))
    tools = take(body, "tools", list_of(json_object), None)
    variables = take(body, "chat_template_kwargs", json_object, {})
    if loaded.tokenizer.chat_template is None:
        raise BadRequest("this model has no chat template; use /v1/completions")
    # Before rendering, so that a wrong parameter is refused early.
    native = native_body(body, loaded.vocab_size, loaded.context_len)
    prompt = await in_thread(_render, loaded.tokenizer, messages, tools, variables)
    check_length(loaded, prompt)
    ids = await encode(loaded, prompt, add_special_tokens=False)
    return await _complete(request, loaded, body, {**native, "input_ids": ids}, "chat.completion")


def _message(value: object, name: str) -> dict[str, object]:
    message = json_object(value, name)
    need(message, "role", string(64), f"{name}.")
    return message


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, object]],
    tools: list[dict[str, object]] | None,
    variables: Mapping[str, object],
) -> str:
    """Return the text of the prompt.

    Raises:
        BadRequest: The template cannot render these messages, or a variable has the name of an
            option of the tokenizer, such as another template, which is a program.
    """
    # messages and variables of a client have any type
    render: Callable[..., object] = tokenizer.apply_chat_template
    if options := inspect.signature(render).parameters.keys() & variables.keys():
        raise BadRequest(
            f"chat_template_kwargs: {', '.join(sorted(options))} is not allowed in a request, only "
            "variables of the model's chat template"
        )
    try:
        return str(
            render(messages, tools=tools, tokenize=False, add_generation_prompt=True, **variables)
        )
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


_COUNT = whole(0, 2**31 - 1)


def native_body(body: Mapping[str, object], vocab_size: int, most_tokens: int) -> dict[str, object]:
    """Convert a body to a body of ``/generate`` without the prompt.

    Args:
        most_tokens: The limit for a body without one.

    Raises:
        BadRequest: A value is wrong, or the body asks for something that would be left out.
    """
    # A wish that would silently be left out is refused.
    wanted_form = take(body, "response_format", json_object, {})
    left_out = [name for name in _NOT_SUPPORTED if body.get(name)]
    if wanted_form.get("type", "text") != "text":
        left_out.append("response_format")
    if left_out:
        raise BadRequest(f"{left_out[0]} is not supported by this engine")
    # Sampling parameters have the same names, but for the limits and the seed.
    sampling = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    # for errors with the names that the client used
    parse_sampling_params(sampling, vocab_size, where="")
    limit = take(body, "max_completion_tokens", _COUNT, 0) or take(body, "max_tokens", _COUNT, 0)
    sampling["max_new_tokens"] = limit or most_tokens
    sampling["min_new_tokens"] = take(body, "min_tokens", _COUNT, 0)
    sampling["sampling_seed"] = take(body, "seed", whole(-(2**63), 2**63 - 1), None)
    # logprobs is a switch in chats and a number of alternatives in completions.
    wanted = body.get("logprobs")
    most = whole(0, vocab_size)
    count = 0 if isinstance(wanted, bool) else take(body, "logprobs", most, 0)
    return {
        "sampling_params": sampling,
        "return_logprob": bool(wanted),
        "top_logprobs_num": take(body, "top_logprobs", most, 0) or count,
        "return_text_in_logprobs": True,
        "stream": take(body, "stream", truth, False),
        "lora_path": body.get("lora_path"),
    }


async def _complete(
    request: web.Request,
    loaded: Served,
    body: Mapping[str, object],
    native: Mapping[str, object],
    kind: Kind,
) -> web.StreamResponse:
    model = take(body, "model", string(4096), "") or loaded.model_path
    parsed = parse_generate(native, loaded.vocab_size)
    await prepare(loaded, parsed)
    head = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": model}
    if parsed.stream:
        options = take(body, "stream_options", json_object, {})
        with_usage = take(options, "include_usage", truth, False)
        return await send_events(
            request, _deltas(loaded, parsed, head, kind, with_usage), index=False
        )
    answers = await run_all(loaded, parsed.requests)
    choices = [_choice(index, answer, kind) for index, answer in enumerate(answers)]
    usage = _usage(answers, parsed.requests[0].params.n)
    return json_answer({**head, "object": kind, "choices": choices, "usage": usage})


def _choice(index: int, answer: Answer, kind: Kind, message: str = "message") -> dict[str, object]:
    """Return an entry of ``choices``. The ``message`` of a part of an answer is a ``delta``."""
    finish = answer["meta_info"]["finish_reason"]
    choice: dict[str, object] = {
        "index": index,
        "finish_reason": None if finish is None else finish["type"],
        "matched_stop": None if finish is None else finish.get("matched"),
        "logprobs": _logprobs(answer, kind),
    }
    if kind == "chat.completion":
        return {**choice, message: {"role": "assistant", "content": answer["text"]}}
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
    head = {**head, "object": "chat.completion.chunk" if kind == "chat.completion" else kind}
    last: dict[int, Answer] = {}
    async for index, answer in answers_as_they_come(loaded, parsed.requests):
        last[index] = answer
        yield index, {**head, "choices": [_choice(index, answer, kind, "delta")]}
    if with_usage:
        usage = _usage([last[i] for i in sorted(last)], parsed.requests[0].params.n)
        yield 0, {**head, "choices": [], "usage": usage}


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    loaded = request.app[SERVED]
    card = {"id": loaded.model_path, "object": "model", "created": 0, "owned_by": "slime"}
    return json_answer({"object": "list", "data": [{**card, "max_model_len": loaded.context_len}]})
