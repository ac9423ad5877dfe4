"""A scripted engine for ``slime check-hooks``, whose answers call a tool or are interrupted by an abort."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from aiohttp import ClientSession, web

if TYPE_CHECKING:
    from slime.types import JsonObject, Tokenizer

_MOST_AFTER_ABORT = 20
_TOO_LONG = "The input is longer than the model's context length"
LAST = "The answer is 4."


@dataclass
class Request:
    """One ``POST /generate``: the prompt and the answer."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    aborted: bool = False
    cut: bool = False  # at the token limit
    of_text: bool = False  # the prompt was sent as a text


class _Params(TypedDict, total=False):
    """The ``sampling_params`` that the scripted engine reads."""

    stop: str | list[str] | None
    no_stop_trim: bool
    max_new_tokens: int | None


class _Answer(TypedDict, total=False):
    """The fields of an engine's answer that the scripted engine changes."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, object]


class ScriptedEngine:
    """A proxy of a real engine that replaces the generated text according to the number of the request.

    The real engine also answers each request, with one token, so that errors and all other fields are real.

    Args:
        url: URL of the real engine.
        answers: Texts of the first answers; all later answers are :data:`LAST`.
        abort_at: Index of the first request that is aborted, together with all later ones; None for no abort.
        on_abort: Called before the answer to an aborted request.
        refuses: Whether every request is refused, as one with a prompt that is too long.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Tokenizer,
        answers: list[str],
        abort_at: int | None,
        on_abort: Callable[[], None],
        refuses: bool = False,
    ) -> None:
        self.refuses = refuses
        self.url, self.tokenizer, self.answers = url, tokenizer, answers
        self.abort_at, self.on_abort = abort_at, on_abort
        self.requests: list[Request] = []
        self.runaway = asyncio.Event()  # set if the function keeps sending requests after the abort
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        self._client: ClientSession | None = None

    async def __aenter__(self) -> ScriptedEngine:
        self._client = ClientSession()
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = int(self._runner.addresses[0][1])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        assert self._client is not None
        await self._client.close()

    async def _forward(self, request: web.Request) -> web.Response:
        if request.path == "/abort_request":
            return web.json_response({"success": True})
        return await self._send(request.method, request.path_qs, await request.read())

    async def _send(self, method: str, path: str, body: bytes) -> web.Response:
        assert self._client is not None
        headers = {"Content-Type": "application/json"}
        async with self._client.request(method, f"{self.url}{path}", data=body or None, headers=headers) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        single = isinstance(body, dict) and (isinstance(body.get("text"), str) or _flat(body.get("input_ids")))
        # Only requests for a single sequence are scripted. Others get the answer of the real engine.
        if not single or (body.get("sampling_params") or {}).get("n", 1) != 1:
            return await self._send("POST", "/generate", json.dumps(body).encode())
        number = len(self.requests)
        params: _Params = dict(body.get("sampling_params") or {})  # type: ignore[assignment]  # JSON from a client
        asked = Request(body.get("input_ids") or self.tokenizer.encode(body["text"]), of_text=not body.get("input_ids"))
        self.requests.append(asked)
        if self.refuses:
            return web.json_response({"error": {"message": _TOO_LONG}}, status=400)
        one = {**body, "stream": False, "return_logprob": True, "sampling_params": {**params, "max_new_tokens": 1}}
        one["sampling_params"].pop("min_new_tokens", None)
        sent = await self._send("POST", "/generate", json.dumps(one).encode())
        if sent.status != 200 or not isinstance(sent.body, bytes):
            return sent
        answer = self._write(json.loads(sent.body), number, asked, params)
        if asked.aborted:
            self.on_abort()
            if self.abort_at is not None and number - self.abort_at >= _MOST_AFTER_ABORT:
                self.runaway.set()
        if not body.get("return_logprob"):
            answer["meta_info"].pop("output_token_logprobs", None)
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    def _write(self, answer: _Answer, number: int, asked: Request, params: _Params) -> _Answer:
        """Replace the text of the real engine's answer by the script's."""
        text = self.answers[number] if number < len(self.answers) else LAST
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        asked.aborted = self.abort_at is not None and number >= self.abort_at
        finish: JsonObject
        if asked.aborted:
            ids = ids[: len(ids) // 2] if number == self.abort_at else []
            text, finish = self.tokenizer.decode(ids), {"type": "abort", "message": "Abort in waiting queue"}
        else:
            text, ids, finish = self._ended(text, ids, params)
        asked.cut = finish["type"] == "length"
        asked.ids, asked.log_probs = ids, [-0.5 - (number * 37 + place) % 64 / 64 for place in range(len(ids))]
        scored = [[value, token, None] for value, token in zip(asked.log_probs, ids, strict=True)]
        meta = {"finish_reason": finish, "completion_tokens": len(ids), "output_token_logprobs": scored}
        answer["text"], answer["meta_info"] = text, answer["meta_info"] | meta
        if "output_ids" in answer:
            answer["output_ids"] = ids
        return answer

    def _ended(self, text: str, ids: list[int], params: _Params) -> tuple[str, list[int], JsonObject]:
        """End a text as an engine does: at a stop string, at the token limit, or with the end token."""
        stops = params.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        at, stop = min(((text.find(stop), stop) for stop in stops if stop in text), default=(-1, ""))
        finish: JsonObject = {"type": "stop", "matched": self.tokenizer.eos_token_id}
        if at >= 0:
            count = next(n for n in range(1, len(ids) + 1) if stop in self.tokenizer.decode(ids[:n]))
            ids, finish = ids[:count], {"type": "stop", "matched": stop}
            text = text[: at + len(stop)] if params.get("no_stop_trim") else text[:at]
        elif self.tokenizer.eos_token_id is not None:
            ids = [*ids, self.tokenizer.eos_token_id]
        most = int(params.get("max_new_tokens") or len(ids))
        if len(ids) > most:
            ids = ids[:most]
            text, finish = self.tokenizer.decode(ids), {"type": "length", "length": most}
        return text, ids, finish


def _flat(ids: object) -> bool:
    return isinstance(ids, list) and bool(ids) and isinstance(ids[0], int)
