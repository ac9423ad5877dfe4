"""Answers of an engine, or of a proxy before it, that are none: the request has failed, and is sent
again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rollout_parts import SmallEngine, arguments

from slime.data.sample import Sample
from slime.engines import http
from slime.engines.handle import EngineHandle
from slime.engines.http import BadAnswer
from slime.engines.sglang_api import EngineError
from slime.plugins.agents.streaming import generate_streaming
from slime.rollout.generate import generate
from slime.rollout.state import GenerateState

Lie = Callable[[dict[str, Any]], Any]


def changed(**meta: Any) -> Lie:
    return lambda answer: {**answer, "meta_info": {**answer["meta_info"], **meta}}


LIES: dict[str, tuple[Lie | str, str]] = {
    "html": ("<html>busy</html>", "not with a JSON object: '<html>busy</html>'"),
    "half": ('{"text": "a', "not with a JSON object"),
    "nan": (
        '{"text": "a", "meta_info": {"output_token_logprobs": [[NaN, 5, null]]}}',
        "not with a JSON object",
    ),
    "list": (lambda answer: [answer], "not with a JSON object"),
    "empty": ("", "not with a JSON object"),
    "no text": (lambda answer: {"meta_info": answer["meta_info"]}, "without text or meta_info"),
    "no meta": (lambda answer: {"text": "a", "meta_info": None}, "without text or meta_info"),
    "no end": (changed(finish_reason=None), "its finish_reason is None"),
    "no log-prob": (
        changed(output_token_logprobs=[[None, 5, None]]),
        "the log-prob of its token 0 is null or NaN",
    ),
    "no log-probs": (
        changed(output_token_logprobs=None),
        "it has no output_token_logprobs; its meta_info has",
    ),
    "no pairs": (changed(output_token_logprobs=[-0.5]), "no pairs of a log-prob and an id"),
    "large id": (
        changed(output_token_logprobs=[[-0.5, 10**6, None]]),
        "its token id 1000000 is none of the 257",
    ),
    "negative id": (
        changed(output_token_logprobs=[[-0.5, -1, None]]),
        "its token id -1 is none of the 257",
    ),
    "id of text": (
        changed(output_token_logprobs=[[-0.5, "a", None]]),
        "its token id a is none of the 257",
    ),
    "one log-prob less": (
        lambda answer: {**answer, "output_ids": [1] * 100},
        "it has 100 tokens and ",
    ),
}


class LyingEngine(SmallEngine):
    """Changes the first ``lies`` answers."""

    def __init__(self, lie: Lie | str, lies: int) -> None:
        super().__init__(jitter=0.0, length=lambda prompt, seed: 4)
        self.lie, self.lies = lie, lies

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await super().answer(request, {**body, "stream": False})
        assert isinstance(response, web.Response) and response.text is not None
        text = response.text
        if self.lies > 0:
            self.lies -= 1
            text = self.lie if isinstance(self.lie, str) else json.dumps(self.lie(json.loads(text)))
        return web.Response(
            text=f"data: {text}\n\ndata: [DONE]\n\n" if body.get("stream") else text
        )


@pytest.fixture
def checkpoint(tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(http, "FIRST_DELAY_SECONDS", 0.001)
    folder = Path(shutil.copytree(tokenizer_dir, tmp_path / "checkpoint"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 257}))
    return folder


async def answered(engine: SmallEngine, folder: Path, ask: Any = generate) -> Sample:
    args = engine.serve(arguments(folder))
    sample = Sample(index=0, group_index=0, prompt="a prompt")
    params = {**GenerateState(args).sampling_params, "sampling_seed": 1}
    return await ask(args, sample, params)


@pytest.mark.parametrize("name", LIES)
async def test_a_bad_answer_is_asked_for_again(checkpoint: Path, name: str) -> None:
    async with SmallEngine(jitter=0.0, length=lambda prompt, seed: 4) as honest:
        right = await answered(honest, checkpoint)
    async with LyingEngine(LIES[name][0], lies=2) as engine:
        sample = await answered(engine, checkpoint)
        assert len(engine.requests) == 3
    assert (sample.tokens, sample.rollout_log_probs) == (right.tokens, right.rollout_log_probs)


@pytest.mark.parametrize("name", LIES)
async def test_an_engine_that_gives_no_other_is_named(checkpoint: Path, name: str) -> None:
    async with LyingEngine(LIES[name][0], lies=1000) as engine:
        with pytest.raises(BadAnswer) as raised:
            await answered(engine, checkpoint)
        assert len(engine.requests) == http.BAD_ANSWERS
        assert f"{engine.url}/generate answered 200, but" in str(raised.value) and LIES[name][
            1
        ] in str(raised.value)


@pytest.mark.parametrize(
    "name", sorted(LIES.keys() - {"empty", "no end", "no log-probs", "one log-prob less"})
)
async def test_a_bad_part_of_a_stream_is_a_lost_stream(checkpoint: Path, name: str) -> None:
    async with LyingEngine(LIES[name][0], lies=2) as engine:
        sample = await answered(engine, checkpoint, generate_streaming)
        assert len(engine.requests) == 3 and sample.response_length == 4


async def test_older_weights_than_before_are_none_of_the_synchronous_loop(checkpoint: Path) -> None:
    async with LyingEngine(changed(weight_version="0.9"), lies=0) as engine:
        engine.version = "0.10"
        args = engine.serve(arguments(checkpoint))
        params = {**GenerateState(args).sampling_params, "sampling_seed": 1}
        for lies in (0, 1):
            engine.lies = lies
            sample = await generate(args, Sample(index=0, group_index=0, prompt="a prompt"), params)
            assert sample.weight_versions == ["0.10"]
        assert len(engine.requests) == 3
        engine.lies = 1000
        with pytest.raises(BadAnswer, match=r"weights 0\.9.*than 0\.10"):
            await generate(args, Sample(index=0, group_index=0, prompt="a prompt"), params)


async def test_what_an_engine_says_of_itself_is_an_object() -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>busy</html>")

    app = web.Application()
    app.router.add_get("/server_info", page)
    async with TestServer(app) as server:
        with pytest.raises(EngineError, match=r"/server_info answered 200.*JSON"):
            await EngineHandle(str(server.make_url("")).rstrip("/")).connect()
