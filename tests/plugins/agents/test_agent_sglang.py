"""The endpoint before real SGLang on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from agent_parts import arguments

from slime.data.sample import Sample
from slime.engines.http import get
from slime.engines.launch import EngineSettings, EngineSpec, start_engine
from slime.plugins.agents.server import AgentServer
from slime.rollout.state import GenerateState

pytestmark = [pytest.mark.sglang, pytest.mark.real, pytest.mark.long, pytest.mark.timeout(600)]
HELLO: list[Any] = [{"role": "user", "content": "say something"}]


@pytest.fixture(scope="module")
def sglang(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    args = arguments(tiny_model)
    args.rollout_backend, args.rollout_dtype = "sglang", "float32"
    args.sglang |= {"device": "cpu", "max_total_tokens": 8192, "dtype": "float32"}
    log = tmp_path_factory.mktemp("log") / "engine.log"
    engine = start_engine(
        EngineSettings.from_args(args), EngineSpec(0, str(tiny_model)), log_path=log
    )
    try:
        engine.wait_ready(300)
        yield engine
    finally:
        engine.stop()


async def test_real_sglang(endpoint: AgentServer, tiny_model: Path, sglang: Any) -> None:
    args = arguments(tiny_model, sglang.url)
    args.rollout_backend = "sglang"
    state = GenerateState(args)
    session = endpoint.open(state, Sample(prompt="p"), state.sampling_params)
    url = endpoint.url(session)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    other = anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0)
    create = client.chat.completions.create

    first = await create(model="m", messages=HELLO, max_tokens=12)
    said = [*HELLO, first.choices[0].message, {"role": "user", "content": "and now?"}]
    chunks = [
        chunk async for chunk in await create(model="m", messages=said, max_tokens=12, stream=True)
    ]
    async with other.messages.stream(
        model="m", messages=HELLO, max_tokens=12, stop_sequences=["e"]
    ) as stream:
        final = await stream.get_final_message()
    one, two, three = session.tree.turns.values()
    assert (
        two.parent is one
        and "".join(c.choices[0].delta.content or "" for c in chunks) == two.answer["content"]
    )
    assert final.content[0].text == three.answer["content"] and "e" not in three.answer["content"]  # type: ignore[union-attr]
    eos = state.tokenizer.eos_token
    assert all(eos not in turn.answer["content"] for turn in (one, two, three))
    ended = [
        turn for turn in (one, two, three) if turn.output_ids[-1] == state.tokenizer.eos_token_id
    ]
    assert all(turn.outputs[-1]["meta_info"]["finish_reason"]["type"] == "stop" for turn in ended)
    samples = session.tree.samples(state, session.sample)
    assert sum(s.effective_response_length for s in samples) == sum(
        len(t.output_ids) for t in (one, two, three)
    )

    with pytest.raises(openai.BadRequestError) as refused:
        await create(model="m", messages=[{"role": "user", "content": "x" * 1100}])
    assert refused.value.code == "context_length_exceeded"
    session.params["ignore_eos"] = True
    stream = await create(
        model="m", messages=[{"role": "user", "content": "long"}], max_tokens=180, stream=True
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    async with asyncio.timeout(60):
        while not session.counts["cancelled"]:
            await asyncio.sleep(0.05)
        while (await get(f"{sglang.url}/v1/loads"))["loads"][0]["num_running_reqs"]:
            await asyncio.sleep(0.2)
    assert len(session.tree.turns) == 3
