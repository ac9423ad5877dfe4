"""A generate function that reads the answer as it is made: ``--custom-generate-function-path
slime.rollout.sglang_streaming_rollout.generate_streaming``.

An aborted rollout keeps every token that has arrived, without waiting for the engine's last word.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import orjson

from slime.data.sample import Sample
from slime.engines.http import HttpError, retrying, session
from slime.observability.trace_utils import trace_span
from slime.rollout.context import says_too_long
from slime.rollout.generate import (
    append_output,
    get_model_url,
    remaining,
    request,
    request_seconds,
    routing_headers,
    without_room,
)
from slime.rollout.prompts import prompt_ids
from slime.rollout.state import GenerateState

if TYPE_CHECKING:
    import aiohttp

_LOOK_SECONDS = 0.5  # how often the abort flag is looked at while no token comes


async def generate_streaming(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Like the default generate function, over server-sent events.

    When the engine is lost on the way, the tokens that came are kept, and the rollout loop goes on from there.

    Raises:
        HttpError: the engine refused, or none could be reached.
        TimeoutError: no end within ``--sglang-router-request-timeout-secs``.
    """
    state = GenerateState(args)
    if not sample.num_tokens:
        sample.tokens = prompt_ids(state, sample)
        sample.pack()
    params = remaining(args, sample, sampling_params)
    if params is None:
        return without_room(args, sample)
    body = {**request(args, state, sample, params), "stream": True}
    answer = StreamedAnswer()
    with trace_span(sample, "sglang_generate_stream"):
        async with asyncio.timeout(request_seconds(args)):
            try:
                await retrying(lambda: read_stream(args, sample, body, answer, state), give_up=lambda: state.aborted)
            except HttpError as error:
                if error.status != 400 or not says_too_long(error):
                    raise
                return without_room(args, sample)
    if answer.meta is not None:
        append_output(args, sample, answer.output(aborted=not answer.ended))
    else:
        sample.status = Sample.Status.ABORTED
    return sample


class StreamedAnswer:
    """What has arrived. SGLang sends text and log-probs cumulatively, or (a server flag) piece by piece.

    Args:
        on_text: called with the text so far, each time that some comes.
    """

    def __init__(self, on_text: Callable[[str], None] | None = None) -> None:
        self.on_text = on_text
        self.text = ""
        self.scored: list[Any] = []
        self.meta: dict[str, Any] | None = None

    def add(self, chunk: dict[str, Any]) -> None:
        self.meta = chunk["meta_info"]
        scored = self.meta.get("output_token_logprobs") or []
        if len(scored) == self.meta.get("completion_tokens", len(scored)):
            self.text, self.scored = chunk["text"], scored
        else:
            self.text, self.scored = self.text + chunk["text"], self.scored + scored
        if self.on_text is not None:
            self.on_text(self.text)

    @property
    def ended(self) -> bool:
        return self.meta is not None and self.meta.get("finish_reason") is not None

    def output(self, aborted: bool) -> dict[str, Any]:
        meta = {**(self.meta or {}), "output_token_logprobs": self.scored}
        if aborted:
            meta["finish_reason"] = {"type": "abort"}
        return {"text": self.text, "meta_info": meta}


async def read_stream(
    args: Any, sample: Sample, body: dict[str, Any], answer: StreamedAnswer, state: GenerateState
) -> None:
    """One try of a streaming request; ``answer`` takes what comes, until the end, an abort or a lost engine.

    Raises:
        HttpError: the engine refused, or was gone before the first token.
    """
    import aiohttp

    headers = {"Content-Type": "application/json", **(routing_headers(args, sample) or {})}
    url = get_model_url(args)
    try:
        async with session().post(url, data=orjson.dumps(body), headers=headers) as response:
            if response.status != 200:
                raise HttpError(f"{url} answered {response.status}: {(await response.text())[:500]}", response.status)
            async for chunk in _events(response, state):
                if "error" in chunk:
                    raise HttpError(f"{url}, sample {sample.index}: {chunk['error']}", _status(chunk["error"]))
                answer.add(chunk)
                if answer.ended:
                    return
    except (aiohttp.ClientError, OSError) as error:
        if answer.meta is None:
            raise HttpError(f"POST {url}: {error or type(error).__name__}") from error
    if answer.meta is None and not state.aborted:
        raise HttpError(f"the stream of sample {sample.index} ended before the first token")


def _status(error: Any) -> int:
    """Of an error inside a stream: an engine that refuses sends an object, at times with a code; text is a router's
    that lost its engine."""
    return int(error.get("code") or 400) if isinstance(error, dict) else 500


async def _events(response: aiohttp.ClientResponse, state: GenerateState) -> AsyncIterator[dict[str, Any]]:
    """``data:`` lines as objects, until ``[DONE]``, the end of the stream or an abort."""
    line: asyncio.Task[bytes] | None = None
    try:
        while not state.aborted:
            line = line or asyncio.ensure_future(response.content.readline())
            done, _ = await asyncio.wait([line], timeout=_LOOK_SECONDS)
            if not done:
                continue
            data, line = line.result(), None
            if not data or data.strip() == b"data: [DONE]":
                return
            if data.startswith(b"data:"):
                yield orjson.loads(data[5:])
    finally:
        if line is not None:
            line.cancel()
            await asyncio.gather(line, return_exceptions=True)
