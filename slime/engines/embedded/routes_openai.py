"""``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``: the OpenAI forms, no more than clients need."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from slime.engines.embedded.loading import Loaded
from slime.engines.embedded.protocol import BadRequest, GenerateBody, parse_generate
from slime.engines.embedded.routes_generate import answers_as_they_come, prepare, run_all, send_events
from slime.engines.embedded.web import LOADED, body_of, json_answer

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "n",
)
_REASONS = {"stop": "stop", "length": "length", "abort": "abort"}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    loaded, body = request.app[LOADED], await body_of(request)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message")
    if loaded.tokenizer.chat_template is None:
        raise BadRequest("this model has no chat template; use /v1/completions")
    prompt = loaded.tokenizer.apply_chat_template(
        messages,
        tools=body.get("tools"),
        add_generation_prompt=True,
        tokenize=False,
        **(body.get("chat_template_kwargs") or {}),
    )
    ids = loaded.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return await _complete(request, loaded, body, {"input_ids": list(ids)}, "chat.completion")


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions; the prompt is text or token ids, one or several."""
    loaded, body = request.app[LOADED], await body_of(request)
    prompt = body.get("prompt")
    if not prompt:
        raise BadRequest("prompt must be text or token ids")
    first = prompt[0] if isinstance(prompt, list) else prompt
    key = "text" if isinstance(first, str) else "input_ids"
    return await _complete(request, loaded, body, {key: prompt}, "text_completion")


async def _complete(
    request: web.Request, loaded: Loaded, body: dict[str, Any], prompt: dict[str, Any], kind: str
) -> web.StreamResponse:
    sampling = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    sampling["max_new_tokens"] = body.get("max_completion_tokens") or body.get("max_tokens") or 128
    if body.get("seed") is not None:
        sampling["sampling_seed"] = body["seed"]
    wants = bool(body.get("logprobs"))
    top = int(body.get("top_logprobs") or (body["logprobs"] if wants and body["logprobs"] is not True else 0) or 0)
    native = {**prompt, "sampling_params": sampling, "return_logprob": wants, "top_logprobs_num": top}
    native["return_text_in_logprobs"] = True
    parsed = parse_generate(native, loaded.vocab_size)
    await prepare(loaded, parsed)
    model = body.get("model") or loaded.options.model_path
    head = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": model}
    if body.get("stream"):
        return await send_events(request, _deltas(loaded, parsed, head, kind), index=False)
    answers = await run_all(loaded, parsed.requests)
    choices = [_choice(index, answer, kind) for index, answer in enumerate(answers)]
    return json_answer({**head, "object": kind, "choices": choices, "usage": _usage(answers)})


def _choice(index: int, answer: dict[str, Any], kind: str) -> dict[str, Any]:
    meta = answer["meta_info"]
    choice: dict[str, Any] = {
        "index": index,
        "finish_reason": _REASONS[meta["finish_reason"]["type"]],
        "matched_stop": meta["finish_reason"].get("matched"),
        "logprobs": _logprobs(meta, kind),
    }
    if kind == "chat.completion":
        return {**choice, "message": {"role": "assistant", "content": answer["text"]}}
    return {**choice, "text": answer["text"]}


def _logprobs(meta: dict[str, Any], kind: str) -> dict[str, Any] | None:
    if "output_token_logprobs" not in meta:
        return None
    entries = meta["output_token_logprobs"]
    tops = meta.get("output_top_logprobs") or [[] for _ in entries]
    if kind == "chat.completion":
        content = [
            {"token": text, "logprob": value, "top_logprobs": [{"token": t, "logprob": v} for v, _, t in top]}
            for (value, _, text), top in zip(entries, tops, strict=True)
        ]
        return {"content": content}
    return {
        "tokens": [text for _, _, text in entries],
        "token_logprobs": [value for value, _, _ in entries],
        "top_logprobs": [{t: v for v, _, t in top} for top in tops],
    }


def _usage(answers: list[dict[str, Any]]) -> dict[str, int]:
    prompt = sum(answer["meta_info"]["prompt_tokens"] for answer in answers)
    output = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


async def _deltas(
    loaded: Loaded, parsed: GenerateBody, head: dict[str, Any], kind: str
) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """OpenAI streams what is new; the engine's events hold everything so far."""
    sent = [0] * len(parsed.requests)
    chat = kind == "chat.completion"
    async for index, answer in answers_as_they_come(loaded, parsed.requests):
        text, finish = answer["text"], answer["meta_info"]["finish_reason"]
        new, sent[index] = text[sent[index] :], max(sent[index], len(text))
        piece: dict[str, Any] = {"delta": {"role": "assistant", "content": new}} if chat else {"text": new}
        reason = None if finish is None else _REASONS[finish["type"]]
        choice = {"index": index, "finish_reason": reason, **piece}
        yield index, {**head, "object": f"{kind}.chunk" if chat else kind, "choices": [choice]}


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    loaded = request.app[LOADED]
    card = {"id": loaded.options.model_path, "object": "model", "created": 0, "owned_by": "slime"}
    return json_answer({"object": "list", "data": [{**card, "max_model_len": loaded.context_len}]})


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/chat/completions", chat_completions),
        web.post("/v1/completions", completions),
        web.get("/v1/models", models),
    ]
