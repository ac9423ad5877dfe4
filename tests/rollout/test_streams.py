"""Reading an engine's stream: lines and answers of any length, cumulative or piece by piece."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from rollout_parts import arguments

from slime.data.sample import Sample
from slime.plugins.agents.streaming import (
    Lines,
    StreamedAnswer,
    generate_streaming,
    status_of,
)
from slime.rollout.generate import generate
from slime.rollout.state import GenerateState

TOKENS = 20_000


@given(
    st.binary(max_size=200).map(lambda data: data.replace(b"x", b"\n")),
    st.lists(st.integers(1, 20), min_size=1),
)
def test_lines_however_they_come(data: bytes, sizes: list[int]) -> None:
    lines, found, at, number = Lines(), [], 0, 0
    while at < len(data):
        size = sizes[number % len(sizes)]
        found += lines.add(data[at : at + size])
        at, number = at + size, number + 1
    assert found == data.split(b"\n")[:-1]


def event(begin: int, end: int, finished: bool) -> dict[str, Any]:
    """Tokens ``begin`` to ``end`` of an answer in which each is one letter."""
    meta = {
        "output_token_logprobs": [[-0.5, 97 + i % 26, None] for i in range(begin, end)], "completion_tokens": end,
        "finish_reason": {"type": "length", "length": end} if finished else None, "weight_version": "1",
        "prompt_tokens": 3, "cached_tokens": 0,
    }  # fmt: skip
    return {"text": "".join(chr(97 + i % 26) for i in range(begin, end)), "meta_info": meta}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.booleans())
def test_both_forms_of_a_stream_are_the_same_answer(steps: list[int], incremental: bool) -> None:
    steps = [1 + steps[0], *steps[1:]]
    told: list[str] = []
    answer, end = StreamedAnswer(told.append), 0
    for number, step in enumerate(steps):
        begin, end = (end if incremental else 0), end + step
        answer.add(event(begin, end, finished=number == len(steps) - 1))
    whole = event(0, end, finished=True)
    output = answer.output(aborted=False)
    assert answer.ended and output["text"] == whole["text"] == "".join(told)
    assert (
        output["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]
    )


def packed(*rows: list[int]) -> dict[str, str]:
    ids = np.array([i for row in rows for i in row], np.int32)
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return {
        name: base64.b64encode(value.tobytes()).decode()
        for name, value in (("top_p_token_ids", ids), ("top_p_token_offsets", offsets))
    }


def test_nuclei_of_pieces_are_joined() -> None:
    answer = StreamedAnswer()
    for begin, end, rows in ((0, 2, [[1, 2], [3]]), (2, 3, [[]]), (3, 5, [[4, 5, 6], [7]])):
        chunk = event(begin, end, finished=end == 5)
        chunk["meta_info"] |= packed(*rows)
        answer.add(chunk)
    meta = answer.output(aborted=False)["meta_info"]
    wanted = packed([1, 2], [3], [], [4, 5, 6], [7])
    assert {name: meta[name] for name in wanted} == wanted


@pytest.mark.parametrize("step", [1, 10_000])
async def test_an_answer_of_20000_tokens(tokenizer_dir: Path, step: int) -> None:
    """Piece by piece with an event a token; and cumulatively, in lines of more than 512 KiB."""

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for end in range(step, TOKENS + 1, step):
            chunk = event(end - 1 if step == 1 else 0, end, finished=end == TOKENS)
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        args = arguments(
            tokenizer_dir,
            sglang_router_port=runner.addresses[0][1],
            rollout_max_response_len=TOKENS,
        )
        sample = Sample(prompt="abc", index=0, group_index=0)
        await asyncio.wait_for(
            generate_streaming(args, sample, GenerateState(args).sampling_params), 120
        )
    finally:
        await runner.cleanup()
    assert (
        sample.response_length == len(sample.response) == TOKENS
        and sample.status is Sample.Status.TRUNCATED
    )


@pytest.mark.parametrize("function", [generate, generate_streaming])
async def test_a_rollout_that_ends_while_no_engine_can_be_reached(
    tokenizer_dir: Path, function: Any
) -> None:
    """The response is aborted like any other; an error would end the run."""
    asked = asyncio.Event()

    async def refuse(request: web.Request) -> web.Response:
        asked.set()
        return web.Response(status=503)

    app = web.Application()
    app.router.add_post("/generate", refuse)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        args = arguments(tokenizer_dir, sglang_router_port=runner.addresses[0][1])
        state, sample = GenerateState(args), Sample(prompt="abc", index=0, group_index=0)
        task = asyncio.ensure_future(function(args, sample, state.sampling_params))
        await asked.wait()
        state.aborted = True
        await asyncio.wait_for(task, 60)
    finally:
        await runner.cleanup()
    assert sample.status is Sample.Status.ABORTED and sample.response_length == 0


@pytest.mark.parametrize("function", [generate, generate_streaming])
async def test_an_engine_that_does_not_reply_in_time_is_named(
    tokenizer_dir: Path, function: Any
) -> None:
    async def hang(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    app = web.Application()
    app.router.add_post("/generate", hang)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        port = runner.addresses[0][1]
        args = arguments(
            tokenizer_dir, sglang_router_port=port, sglang_router_request_timeout_secs=0.5
        )
        sample = Sample(prompt="abc", index=7, group_index=0)
        with pytest.raises(
            TimeoutError,
            match=rf"sample 7 .*:{port}/generate .*--sglang-router-request-timeout-secs",
        ):
            await function(args, sample, GenerateState(args).sampling_params)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"code": 503}, 503),
        ({"code": "503"}, 503),
        ({}, 400),
        ({"code": "server_error"}, 500),
        ("lost", 500),
    ],
)
def test_an_error_inside_a_stream_has_a_status_whatever_its_code_is(
    error: object, status: int
) -> None:
    assert status_of(error) == status
