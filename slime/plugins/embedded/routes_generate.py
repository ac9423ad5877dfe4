"""Routes for generation, abort and health, and functions for them that the OpenAI routes use
too.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from aiohttp import web

from slime.plugins.embedded import attention
from slime.plugins.embedded.protocol import (
    GenerateBody,
    GenerateRequest,
    SamplingParams,
    check_scores,
    parse_generate,
)
from slime.plugins.embedded.sequence import (
    Answer,
    FinishReason,
    Sequence,
    StreamedText,
    build_answer,
)
from slime.plugins.embedded.served import SERVED, Generates, Listener, Served, StepFailed
from slime.plugins.http.server import (
    END,
    BadRequest,
    Refused,
    body_of,
    event,
    event_stream,
    json_answer,
    string,
    take,
    truth,
)

routes = web.RouteTableDef()
HEALTH_SECONDS = 20.0
CHARACTERS_PER_TOKEN = 16
SHORT_TEXT = 4096  # a text with at most so many characters is tokenized on the event loop
_readers = ThreadPoolExecutor(2, thread_name_prefix="reader")
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
Event = tuple[Sequence, int, FinishReason | None, str]
"""The arguments of a :data:`Listener`."""


@routes.post("/generate")
async def generate(request: web.Request) -> web.StreamResponse:
    loaded = request.app[SERVED]
    parsed = parse_generate(await body_of(request), loaded.vocab_size)
    await prepare(loaded, parsed)
    if parsed.stream:
        # Each event contains only the new tokens, as in SGLang with --incremental-streaming-output.
        return await send_events(
            request, answers_as_they_come(loaded, parsed.requests), index=not parsed.is_single
        )
    answers = await run_all(loaded, parsed.requests)
    return json_answer(answers[0] if parsed.is_single else answers)


async def prepare(loaded: Served, parsed: GenerateBody) -> None:
    """Tokenize text and read images. Work that takes long is done in a thread, so that it does not
    block the loop.
    """
    for single, text in zip(parsed.requests, parsed.texts, strict=True):
        if text is not None:
            check_length(loaded, text)
        if single.image_data:
            if loaded.images is None:
                raise BadRequest("image_data: this model does not support images")
            reader = await in_thread(loaded.images)
            single.input_ids, single.image_inputs = await in_thread(
                reader.prepare, single.input_ids, text, single.image_data
            )
            single.image_data = []
        elif text is not None:
            single.input_ids = await encode(loaded, text)
            if not single.input_ids:
                raise BadRequest("text must not be empty")
    check_scores(parsed.requests, loaded.context_len)


def check_length(loaded: Served, text: str) -> None:
    """Refuse a text that is far too long before it is tokenized, which takes half a microsecond per
    character.
    """
    most = CHARACTERS_PER_TOKEN * loaded.context_len
    if len(text) > most:
        raise BadRequest(
            f"text has {len(text)} characters, but at most {most} are tokenized "
            f"({CHARACTERS_PER_TOKEN} for each of the context's {loaded.context_len} tokens)"
        )


async def encode(loaded: Served, text: str, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text."""

    def tokenize() -> list[int]:
        return list(loaded.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    return tokenize() if len(text) <= SHORT_TEXT else await in_thread(tokenize)


async def in_thread(function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
    """Run a function in one of the threads that only read requests, so that it delays nothing
    else.
    """
    return await asyncio.get_running_loop().run_in_executor(_readers, function, *arguments)


async def run_all(loaded: Served, requests: list[GenerateRequest]) -> list[Answer]:
    """Generate all requests to their end, and return the responses.

    Raises:
        StepFailed: The engine could not compute one of them.
    """
    answers: dict[int, Answer] = {}
    async for index, (sequence, count, finish, version) in _events(loaded.engine, requests):
        if finish is not None:
            answers[index] = build_answer(sequence, loaded.detokenizer, version, count, finish)
    return [answers[index] for index in range(len(requests))]


async def _events(
    engine: Generates, requests: list[GenerateRequest]
) -> AsyncIterator[tuple[int, Event]]:
    """Yield the index of a request and what the engine tells of it, until all of them have ended.

    If this fails, or is cancelled because the client has disconnected, all of them are aborted.

    Raises:
        StepFailed: The engine could not compute one of them.
    """
    merged: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    def listener(index: int) -> Listener:
        return lambda *event: merged.put_nowait((index, event))

    running = len(requests)
    try:
        for index, single in enumerate(requests):
            await engine.submit(single, listener(index))
        while running:
            index, progress = await merged.get()
            finish = progress[2]
            if finish is not None and finish.get("status_code"):
                raise StepFailed(finish["message"])
            running -= finish is not None
            yield index, progress
    finally:
        if running:
            _abandon(engine, requests)


class _Pieces:
    """Converts the events of one request to partial responses, each with only the new tokens."""

    def __init__(self, loaded: Served) -> None:
        self.detokenizer = loaded.detokenizer
        self.told = 0
        self.text: StreamedText | None = None

    def next(self, progress: Event) -> Answer:
        sequence, count, finish, version = progress
        self.text = self.text or StreamedText(self.detokenizer, sequence)
        start = self.told
        self.told = count
        text = self.text.piece(count, finish)
        return build_answer(sequence, self.detokenizer, version, count, finish, start, text)


# The event loop has only weak references to tasks, so a task that nobody awaits must be referenced
# until it is done.
_background: set[asyncio.Task[None]] = set()


def _abandon(engine: Generates, requests: list[GenerateRequest]) -> None:
    """Abort requests without waiting for the result. The caller may be cancelled already."""
    if engine.failure is not None:
        return

    def abort_all() -> None:
        for single in requests:
            engine.abort(single.rid, True)

    task = asyncio.ensure_future(engine.call(abort_all))
    _background.add(task)
    task.add_done_callback(_background.discard)


async def answers_as_they_come(
    loaded: Served, requests: list[GenerateRequest]
) -> AsyncIterator[tuple[int, Answer]]:
    """Yield the index of a request and a response with its new tokens, after each step that adds
    tokens.
    """
    pieces = [_Pieces(loaded) for _ in requests]
    for single in requests:
        single.stream = True
    async for index, progress in _events(loaded.engine, requests):
        yield index, pieces[index].next(progress)


async def send_events(
    request: web.Request, answers: AsyncIterator[tuple[int, Mapping[str, object]]], index: bool
) -> web.StreamResponse:
    """Stream responses as lines ``data: {…}``, followed by ``data: [DONE]``.

    Args:
        index: Whether to add the index of the request to each response.
    """
    response = event_stream()
    await response.prepare(request)
    try:
        async for number, answer in answers:
            content = {"index": number, **answer} if index else answer
            await response.write(event(content))
    except Refused as error:  # status 200 was sent already, so the error is an event
        kind = "invalid_request_error" if error.status == 400 else "server_error"
        failure = {"error": {"message": str(error), "type": kind, "code": error.status}}
        await response.write(event(failure))
    await response.write(END)
    await response.write_eof()
    return response


@routes.post("/abort_request")
async def abort_request(request: web.Request) -> web.Response:
    """Abort the requests of the body's ``rid``, or all requests with ``{"abort_all": true}``."""
    body = await body_of(request)
    rid = take(body, "rid", string(1024), "")
    everything = take(body, "abort_all", truth, False)
    if not rid and not everything:
        raise BadRequest("pass rid or abort_all: true")
    engine = request.app[SERVED].engine
    await engine.call(engine.abort, None if everything else rid)
    return web.Response(status=200)


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    """Answer with status 200 unless the model thread has failed."""
    engine = request.app[SERVED].engine
    if engine.failure is not None:
        return json_answer(
            {"error": {"message": f"the model's thread failed: {engine.failure!r}"}}, 503
        )
    return web.Response(status=200)


@routes.get("/health_generate")
async def health_generate(request: web.Request) -> web.StreamResponse:
    """Answer with status 200 if the engine completes a step, or if a long forward makes progress.

    An idle engine gets a request for one token; a busy engine completes steps anyway. While
    generation is paused or memory is released, it is enough that the model thread answers.
    """
    loaded = request.app[SERVED]
    engine = loaded.engine
    since = time.monotonic()
    if engine.failure is not None:
        return await health(request)
    probe = GenerateRequest(
        f"HEALTH_CHECK_{uuid.uuid4().hex}", [0], SamplingParams(max_new_tokens=1, temperature=0.0)
    )
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            paused, idle = await engine.call(lambda: (engine.resting, engine.idle))
            if not paused and idle:
                await run_all(loaded, [probe])
            while not paused and engine.last_step < since:
                await asyncio.sleep(0.02)
                paused = engine.resting
    except TimeoutError:
        if attention.progressed_at() < since:
            return json_answer(
                {"error": {"message": f"no token within {HEALTH_SECONDS:.0f} s"}}, 503
            )
    return web.Response(status=200)
