"""The adapters of older releases: a generate function owns its endpoint, opens sessions and gets
samples.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from agent_parts import ScriptedEngine, arguments, make_tokenizer
from aiohttp import web
from aiohttp.test_utils import TestServer

from slime.data.convert import samples_to_train_data
from slime.data.sample import Sample
from slime.plugins.agents.adapters import AnthropicAdapter, BaseAdapter, OpenAIAdapter

pytestmark = pytest.mark.timeout(60)
ASK: list[Any] = [{"role": "user", "content": "what is it?"}]


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Any]:
    """A function that runs an adapter's application on a server of its own, and returns the URL."""
    servers = []

    async def serve(app: web.Application) -> str:
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
        return str(server.make_url("")).rstrip("/")

    yield serve
    for server in servers:
        await server.close()
    from slime.engines.http import close_session

    await close_session()


def adapter_for(
    kind: type[BaseAdapter], engine: ScriptedEngine, folder: Path, **more: Any
) -> BaseAdapter:
    tokenizer = engine.tokenizer
    return kind(
        tokenizer=tokenizer, sglang_url=engine.url, args=arguments(folder, engine.url), **more
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "max_position_embeddings": 1024}'
    )
    return tmp_path


async def test_a_session_of_an_openai_agent_becomes_samples(served: Any, model: Path) -> None:
    """Two turns are one sample: the answers are trained, with the engine's log-probs, and the rest
    is context.
    """
    async with ScriptedEngine(make_tokenizer(), ["seven", "yes, seven", "or eight"]) as engine:
        adapter = adapter_for(OpenAIAdapter, engine, model)
        url = await served(adapter.app)
        sid = adapter.open_session(
            "s-1", sampling_defaults={"temperature": 0.5, "max_new_tokens": 50}
        )
        with pytest.raises(ValueError, match="'s-1'"):
            adapter.open_session("s-1")
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=sid, max_retries=0)
        first = (await client.chat.completions.create(model="m", messages=ASK)).choices[0].message
        more = [*ASK, first.model_dump(), {"role": "user", "content": "sure?"}]
        await client.chat.completions.create(model="m", messages=more)
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "another"}]
        )
        with pytest.raises(openai.NotFoundError):
            await client.post("/messages", body={}, cast_to=object)  # another API
        base = Sample(index=3, group_index=1, prompt="p", label="7", metadata={"own": 1})
        samples = await adapter.finish_session(
            sid, base_sample=base, reward=0.5, extra_metadata={"solved": True}
        )
        with pytest.raises(openai.InternalServerError) as late:
            await client.chat.completions.create(model="m", messages=ASK)
    assert late.value.status_code == 503
    assert engine.bodies[0]["sampling_params"]["temperature"] == 0.5
    assert len(samples) == 2 and {sample.index for sample in samples} == {3}
    long = samples[0]
    assert (long.reward, long.label, long.metadata["own"], long.metadata["solved"]) == (
        0.5,
        "7",
        1,
        True,
    )
    assert long.status is Sample.Status.COMPLETED and long.loss_mask is not None
    response = long.tokens[len(long.tokens) - long.response_length :]
    trained = [token for token, m in zip(response, long.loss_mask, strict=True) if m]
    assert engine.tokenizer.decode(trained) == "seven<|end|>yes, seven<|end|>"
    (data,) = [samples_to_train_data(adapter.args, [[sample] for sample in samples])]
    assert len(data["tokens"]) == 2 and len(data["rollout_log_probs"][0]) == long.response_length


async def test_an_anthropic_agent_has_a_limit_of_turns(served: Any, model: Path) -> None:
    async with ScriptedEngine(make_tokenizer(), ["one", "two"]) as engine:
        adapter = adapter_for(AnthropicAdapter, engine, model, max_turns_per_sid=1)
        url = await served(adapter.app)
        client = anthropic.AsyncAnthropic(
            base_url=url, api_key=adapter.open_session("a"), max_retries=0
        )
        answer = await client.messages.create(model="m", max_tokens=20, messages=ASK)
        assert answer.content[0].type == "text" and answer.content[0].text == "one"
        with pytest.raises(anthropic.RateLimitError, match="1 turns"):
            await client.messages.create(model="m", max_tokens=20, messages=ASK)
        await adapter.shutdown_session("a")
        with pytest.raises(anthropic.InternalServerError):
            await client.messages.create(model="m", max_tokens=20, messages=ASK)
        (sample,) = await adapter.finish_session(
            "a", base_sample=Sample(index=0), max_sample_tokens=16
        )
        assert (sample.num_tokens, sample.response_length) == (
            16,
            1,
        ) and sample.status is Sample.Status.TRUNCATED
        with pytest.raises(KeyError):
            await adapter.finish_session("a", base_sample=Sample())
        await adapter.drop_session("a")


async def test_the_context_of_a_session_and_what_was_never_opened(served: Any, model: Path) -> None:
    async with ScriptedEngine(make_tokenizer(), ["one"]) as engine:
        adapter = adapter_for(OpenAIAdapter, engine, model, debug_callback=print)
        client = openai.AsyncOpenAI(
            base_url=f"{await served(adapter.app)}/v1", api_key="nobody", max_retries=0
        )
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="m", messages=ASK)
        client.api_key = adapter.open_session("small", max_context_tokens=5)
        with pytest.raises(openai.BadRequestError, match="is 5"):
            await client.chat.completions.create(model="m", messages=ASK)
        await adapter.drop_session("small")
        assert engine.bodies == []


def test_an_adapter_without_args_takes_the_model_of_its_tokenizer(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url="http://10.0.0.1:3000")
    assert (adapter.args.hf_checkpoint, adapter.args.sglang_router_port) == (str(model), 3000)
    assert adapter.open_session("x") == "x"
    with pytest.raises(ValueError, match="http://host:port"):
        OpenAIAdapter(tokenizer=tokenizer, sglang_url="somewhere")
