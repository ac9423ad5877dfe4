"""A generate function that streams the response.

Use with ``--custom-generate-function-path
slime.rollout.sglang_streaming_rollout.generate_streaming``. When a rollout is aborted, every token
that has arrived is kept, without waiting for the engine's final reply.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from slime.data.sample import Sample
from slime.engines.http import BadAnswer, HttpError, decoded, session
from slime.engines.keys import auth_headers
from slime.rollout.generate import (
    answer_problem,
    get_model_url,
    respond,
    routing_headers,
    with_retries,
)
from slime.rollout.state import GenerateState
from slime.types import GenerateBody, GenerateOutput, MetaInfo, SamplingParams

if TYPE_CHECKING:
    import aiohttp

    from slime.config.args import Args

_POLL_SECONDS = 0.5  # interval of checks of the abort flag while no token arrives


async def generate_streaming(args: Args, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Generate one response like the default generate function, but with server-sent events.

    If the engine is lost during the response, the tokens so far are kept, and the rollout loop
    continues from them.

    Raises:
        HttpError: The engine refused the request, or no engine could be reached.
        TimeoutError: The response was not complete within ``--sglang-router-request-timeout-secs``.
    """
    return await respond(GenerateState(args), sample, sampling_params, _stream)


# Like the default function, it returns ABORTED where an abort ended the response.
generate_streaming.reports_aborts = True  # type: ignore[attr-defined]


async def _stream(
    state: GenerateState, sample: Sample, body: GenerateBody
) -> GenerateOutput | None:
    body["stream"] = True
    answer = StreamedAnswer()
    await with_retries(state, sample, lambda: read_stream(state, sample, body, answer))
    return None if answer.meta is None else answer.output(aborted=not answer.ended)


class StreamedAnswer:
    """The part of a streamed reply that has arrived.

    Engines that slime starts send only what is new in each chunk, so the cost of a stream is linear
    in its length. Other engines may send the whole text and all log-probs so far in each chunk, as
    SGLang does without ``--incremental-streaming-output``. Both forms are supported.

    Args:
        on_text: Called with each piece of new text.
    """

    def __init__(self, on_text: Callable[[str], None] | None = None) -> None:
        self.on_text = on_text
        self.scored: list[Any] = []
        self.meta: MetaInfo | None = None
        self._parts: list[str] = []
        self._length = 0  # characters
        self._nuclei: list[tuple[Any, Any]] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, chunk: GenerateOutput) -> None:
        # Cumulative chunks replace what is there, others are appended.
        meta = chunk["meta_info"]
        text = chunk["text"]
        scored = meta.get("output_token_logprobs") or []
        nuclei = (
            [(meta["top_p_token_ids"], meta["top_p_token_offsets"])]
            if "top_p_token_ids" in meta
            else []
        )
        # A chunk with as many log-probs as tokens so far is cumulative. The first chunk always is,
        # but there both forms are the same.
        cumulative = len(scored) == meta.get("completion_tokens", len(scored))
        if cumulative:
            new = text[self._length :]
            self._parts = [text]
            self.scored = scored
            self._nuclei = nuclei
        else:
            new = text
            self._parts.append(text)
            self.scored += scored
            self._nuclei += nuclei
        self.meta = meta
        self._length = len(text) if cumulative else self._length + len(text)
        if self.on_text is not None and new:
            self.on_text(new)

    @property
    def ended(self) -> bool:
        return self.meta is not None and self.meta.get("finish_reason") is not None

    def output(self, aborted: bool) -> GenerateOutput:
        meta: MetaInfo = {**(self.meta or {}), "output_token_logprobs": self.scored}
        if self._nuclei:
            meta["top_p_token_ids"], meta["top_p_token_offsets"] = join_nuclei(self._nuclei)
        if aborted:
            meta["finish_reason"] = {"type": "abort"}
        return {"text": self.text, "meta_info": meta}


def join_nuclei(parts: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Join the ``top_p_token_ids`` and ``top_p_token_offsets`` of the chunks of a reply (base64 of
    int32 arrays).
    """
    decoded = [[np.frombuffer(base64.b64decode(item), np.int32) for item in part] for part in parts]
    sizes = np.concatenate([[0], *(np.diff(offsets) for _, offsets in decoded)])
    joined = np.concatenate([ids for ids, _ in decoded]), np.cumsum(sizes).astype(np.int32)
    ids, offsets = (base64.b64encode(value.tobytes()).decode() for value in joined)
    return ids, offsets


class Lines:
    """Split a stream of bytes into lines of any length, in linear time."""

    def __init__(self) -> None:
        self._open: list[bytes] = []

    def add(self, part: bytes) -> list[bytes]:
        """Return the lines that ``part`` completes, without their line ends."""
        first, *rest = part.split(b"\n")
        self._open.append(first)
        if not rest:
            return []
        done = [b"".join(self._open), *rest[:-1]]
        self._open = [rest[-1]]
        return done


async def read_stream(
    state: GenerateState, sample: Sample, body: GenerateBody, answer: StreamedAnswer
) -> None:
    """Send a streaming request once, and add its chunks to ``answer`` until the end, an abort, or a
    lost engine.

    Raises:
        HttpError: The engine refused the request, or it was lost before the first token.
    """
    import aiohttp

    # The address is read in each attempt: a router that was started again may have another one.
    url = get_model_url(state.args)
    headers = {
        "Content-Type": "application/json",
        **auth_headers(url),
        **(routing_headers(state, sample) or {}),
    }
    try:
        async with session().post(url, data=orjson.dumps(body), headers=headers) as response:
            if response.status != 200:
                raise HttpError(
                    f"{url} answered {response.status}: {(await response.text())[:500]}",
                    response.status,
                )
            async for chunk in _events(response, state):
                # A lost engine is no error if tokens have arrived: generation continues from them.
                if isinstance(chunk, dict) and "error" in chunk:
                    failure = HttpError(
                        f"{url}, sample {sample.index}: {chunk['error']}", status_of(chunk["error"])
                    )
                    if answer.meta is None or not failure.retryable:
                        raise failure
                    return  # as below, where the connection is lost
                if problem := answer_problem(chunk, state.requests.vocabulary, part=True):
                    raise BadAnswer(f"{url} streamed a part that is none: {problem}")
                answer.add(chunk)
                if answer.ended:
                    return
    except BadAnswer:
        if answer.meta is None:
            raise
    except (aiohttp.ClientError, OSError) as error:
        # a retry after the first token would append tokens twice, so keep what has arrived
        if answer.meta is None:
            raise HttpError(f"POST {url}: {error or type(error).__name__}") from error
    if answer.meta is None and not state.aborted:
        raise HttpError(f"the stream of sample {sample.index} ended before the first token")


def status_of(error: object) -> int:
    """Return the HTTP status for an error inside a stream.

    An engine that refuses a request sends an object, sometimes with a code. A router that lost its
    engine sends text, which counts as a server error and is retried.
    """
    code = str(error.get("code") or 400) if isinstance(error, dict) else "500"
    return int(code) if code.isdigit() else 500  # some routers send a name


async def _events(response: aiohttp.ClientResponse, state: GenerateState) -> AsyncIterator[Any]:
    """Yield the objects of the ``data:`` lines until ``[DONE]``, the end of the stream, or an
    abort.
    """
    lines = Lines()
    part = None
    try:
        while not state.aborted:
            part = part or asyncio.ensure_future(response.content.readany())
            # wait() and not wait_for(): a timeout must not cancel the read, which could lose data
            # that has arrived.
            done, _ = await asyncio.wait([part], timeout=_POLL_SECONDS)
            if not done:
                continue
            data = part.result()
            part = None
            if not data:
                return
            for line in lines.add(data):
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data:"):
                    yield decoded(line[5:])
    finally:
        if part is not None:
            part.cancel()
            await asyncio.gather(part, return_exceptions=True)
