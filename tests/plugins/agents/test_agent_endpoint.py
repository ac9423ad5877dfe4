"""The real client libraries against the endpoint, before the real embedded engine."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import anthropic
import openai
import pytest
from agent_parts import arguments

from slime.data.sample import Sample
from slime.plugins.agents.server import AgentServer
from slime.plugins.agents.session import Session
from slime.rollout.state import GenerateState

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say something"}]


class Client:
    """A session and both libraries' clients for it."""

    def __init__(
        self, server: AgentServer, tiny_model: Any, engine: Any, seed: int = 7, **more: Any
    ) -> None:
        self.args = arguments(tiny_model, engine.url, **more)
        self.state = GenerateState(self.args)
        params = {**self.state.sampling_params, "sampling_seed": seed}
        self.session: Session = server.open(
            self.state, Sample(prompt="p", index=3, group_index=1), params
        )
        self.url = server.url(self.session)

    @functools.cached_property
    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.session.id, max_retries=0)

    @functools.cached_property
    def anthropic(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=self.session.id, max_retries=0)

    async def chat(self, messages: list[Any], **more: Any) -> Any:
        return await self.openai.chat.completions.create(
            model="m", messages=messages, **{"max_tokens": 12, **more}
        )

    def samples(self) -> list[Sample]:
        return self.session.tree.samples(self.state, self.session.sample)


@pytest.fixture
def client(endpoint: AgentServer, tiny_model: Any, engine: Any) -> Client:
    return Client(endpoint, tiny_model, engine)


async def test_a_conversation_goes_on_from_the_tokens_of_its_earlier_turns(client: Client) -> None:
    first = await client.chat(HELLO)
    said = first.choices[0].message
    assert first.choices[0].finish_reason in ("stop", "length") and said.role == "assistant"
    messages = [*HELLO, said.model_dump(), {"role": "user", "content": "and now?"}]
    second = await client.chat(messages)
    one, two = client.session.tree.turns.values()
    assert two.parent is one and two.prompt_tokens == second.usage.prompt_tokens
    assert (
        first.usage.completion_tokens == len(one.output_ids)
        and two.ids()[: one.length] == one.ids()
    )
    tokenizer = client.state.tokenizer
    closing = "" if one.output_ids[-1] == tokenizer.eos_token_id else "<|end|>"
    assert tokenizer.decode(two.added_ids) == f"{closing}\n<|user|> and now?<|end|>\n<|assistant|> "
    (sample,) = client.samples()
    trained = [
        token
        for token, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True)
        if m
    ]
    assert trained == one.output_ids + two.output_ids and sample.tokens == two.ids()
    assert len(sample.weight_versions) == 2 and sample.metadata["round_number"] == 2
    assert sample.metadata["messages"][-1]["content"] == second.choices[0].message.content


async def test_a_streamed_chat_is_what_was_recorded(client: Client) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in await client.chat(HELLO, **options)]
    (turn,) = client.session.tree.turns.values()
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == turn.answer["content"] and len(chunks) > 4
    assert chunks[-2].choices[0].finish_reason == ("length" if turn.cut else "stop")
    assert chunks[-1].usage.completion_tokens == len(turn.output_ids)
    again = await client.chat(
        [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    )
    assert again.choices and client.session.tree.leaves()[0].parent is turn


async def test_responses_go_on_by_id_and_by_items(client: Client) -> None:
    create = client.openai.responses.create
    first = await create(model="m", input="one", instructions="be brief", max_output_tokens=8)
    assert first.output[0].content[0].text == first.output_text
    second = await create(
        model="m",
        input="two",
        instructions="be brief",
        previous_response_id=first.id,
        max_output_tokens=8,
    )
    items: list[Any] = [
        {"role": "user", "content": "one"},
        *first.output,
        {"role": "user", "content": "two"},
    ]
    third = await create(model="m", input=items, instructions="be brief", max_output_tokens=8)
    one, two, three = client.session.tree.turns.values()
    assert two.parent is one and three.parent is one and two.added_ids == three.added_ids
    assert second.usage.input_tokens == third.usage.input_tokens == two.prompt_tokens
    with pytest.raises(openai.NotFoundError):
        await create(model="m", input="x", previous_response_id="resp_other")


async def test_a_streamed_response(client: Client) -> None:
    async with client.openai.responses.stream(
        model="m", input="one", max_output_tokens=10
    ) as stream:
        events: list[Any] = [event async for event in stream]
    final = events[-1].response
    (turn,) = client.session.tree.turns.values()
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output[0].content[0].text == turn.answer["content"]
    assert final.id == f"resp_{turn.id}" and final.status == (
        "incomplete" if turn.cut else "completed"
    )


async def test_anthropic_messages_whole_and_streamed(client: Client) -> None:
    whole = {"model": "m", "max_tokens": 10, "system": [{"type": "text", "text": "be brief"}]}
    first = await client.anthropic.messages.create(
        **whole, messages=[{"role": "user", "content": "one"}]
    )
    assert first.stop_reason in ("end_turn", "max_tokens") and first.content[0].type == "text"
    messages: list[Any] = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [{"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}],
        },
    ]
    async with client.anthropic.messages.stream(**whole, messages=messages) as stream:
        text = "".join([part async for part in stream.text_stream])
        final = await stream.get_final_message()
    one, two = client.session.tree.turns.values()
    assert two.parent is one and text == final.content[0].text == two.answer["content"]
    usage = final.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == two.prompt_tokens
    counted = await client.anthropic.messages.count_tokens(
        model="m", messages=[{"role": "user", "content": "one"}]
    )
    assert counted.input_tokens > 3
    assert (await client.openai.models.list()).data[0].id == "slime"


async def test_repeated_and_changed_requests_branch_and_each_answer_is_trained_once(
    client: Client,
) -> None:
    first = await client.chat(HELLO)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    ask = [*HELLO, said, {"role": "user", "content": "go on"}]
    answers = [await client.chat(ask, max_tokens=30) for _ in range(2)]
    # other seeds
    assert answers[0].choices[0].message.content != answers[1].choices[0].message.content
    await client.chat(
        [
            *HELLO,
            {"role": "assistant", "content": "never said"},
            {"role": "user", "content": "go on"},
        ]
    )
    both = await client.chat(HELLO, n=2)
    assert len(both.choices) == 2
    session = client.session
    assert (
        session.counts["turns"] == 6
        and session.counts["branches"] == 4
        and len(session.tree.leaves()) == 5
    )
    samples = client.samples()
    assert sum(sample.effective_response_length for sample in samples) == sum(
        len(turn.output_ids) for turn in session.tree.turns.values()
    )
    shared = [s for s in samples if s.metadata["round_number"] == 2]
    assert len(shared) == 2 and shared[0].loss_mask[0] == 1 and shared[1].loss_mask[0] == 0
    assert all(len(s.rollout_log_probs) == s.response_length for s in samples)


async def test_the_same_seed_gives_the_same_conversation(
    endpoint: AgentServer, tiny_model: Any, engine: Any
) -> None:
    texts = []
    for _ in range(2):
        client = Client(endpoint, tiny_model, engine, seed=11)
        first = (await client.chat(HELLO)).choices[0].message.content
        asks = [
            [*HELLO, {"role": "assistant", "content": first}, {"role": "user", "content": word}]
            for word in "abc"
        ]
        answers = await asyncio.gather(*(client.chat(ask) for ask in asks))
        texts.append([first, *(answer.choices[0].message.content for answer in answers)])
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


async def test_32_sessions_at_once(endpoint: AgentServer, tiny_model: Any, engine: Any) -> None:
    async def talk(number: int) -> None:
        client = Client(endpoint, tiny_model, engine, seed=number)
        messages: list[Any] = [{"role": "user", "content": f"I am {number}"}]
        for turn in range(3):
            answer = await client.chat(messages)
            text = answer.choices[0].message.content
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"{number} again {turn}"},
            ]
        (sample,) = client.samples()
        said = client.state.tokenizer.decode(sample.tokens)
        assert said.startswith(f"<|user|> I am {number}<|end|>") and f"{number} again 1" in said
        assert client.session.counts == {"turns": 3, "branches": 0}

    await asyncio.gather(*(talk(number) for number in range(32)))


async def test_a_client_that_leaves_in_the_middle_of_a_stream(client: Client, engine: Any) -> None:
    from slime.engines.http import get

    client.session.params["ignore_eos"] = True  # so that both answers are long
    stream = await client.chat(HELLO, stream=True, max_tokens=200)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    whole = asyncio.ensure_future(client.chat(HELLO, max_tokens=200))
    async with asyncio.timeout(20):
        while client.session.counts["cancelled"] < 1 or sum(client.session.asked.values()) < 2:
            await asyncio.sleep(0.01)
        whole.cancel()
        while client.session.counts["cancelled"] < 2:
            await asyncio.sleep(0.01)
        while (await get(f"{engine.url}/v1/loads"))["loads"][0]["num_running_reqs"]:
            await asyncio.sleep(0.02)
    assert client.session.tree.turns == {}, "an answer that nobody got is not trained"
    assert (await client.chat(HELLO)).choices and client.session.counts["branches"] == 0


async def test_a_full_context_is_refused_in_each_api(
    endpoint: AgentServer, tiny_model: Any, engine: Any
) -> None:
    client = Client(endpoint, tiny_model, engine, rollout_max_context_len=90)
    first = await client.chat(HELLO, max_tokens=None)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    long = {"role": "user", "content": "a long story " * 20}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat([*HELLO, said, long], stream=stream)
        assert (
            refused.value.code == "context_length_exceeded"
            and "maximum context length is 90" in str(refused.value)
        )
    with pytest.raises(anthropic.BadRequestError, match="too long"):
        await client.anthropic.messages.create(model="m", max_tokens=5, messages=[long])
    (sample,) = client.samples()
    assert sample.status is Sample.Status.TRUNCATED and client.session.counts["overflows"] == 3


async def test_the_model_that_is_served_bounds_the_context(client: Client) -> None:
    with pytest.raises(openai.BadRequestError, match="is 1024"):
        await client.chat([{"role": "user", "content": "x" * 1100}])


async def test_sessions_are_told_apart_by_path_and_by_key(
    client: Client, endpoint: AgentServer
) -> None:
    plain = f"http://127.0.0.1:{endpoint.port}"
    by_key = openai.AsyncOpenAI(base_url=f"{plain}/v1", api_key=client.session.id, max_retries=0)
    await by_key.chat.completions.create(model="m", messages=HELLO, max_tokens=3)  # type: ignore[arg-type]
    other = anthropic.AsyncAnthropic(base_url=plain, api_key=client.session.id, max_retries=0)
    await other.messages.create(
        model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=3
    )
    assert client.session.counts["turns"] == 2
    with pytest.raises(openai.AuthenticationError):
        await by_key.with_options(api_key="nobody").chat.completions.create(
            model="m", messages=HELLO
        )  # type: ignore[arg-type]
    endpoint.close(client.session)
    with pytest.raises(anthropic.AuthenticationError):
        await other.messages.create(
            model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=3
        )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "a list of 1 to"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "only text"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"messages": HELLO, "n": 129}, "from 1 to 128"),
        ({"messages": HELLO, "functions": [{"name": "f"}]}, "functions is"),
        ({"messages": HELLO, "n": 2, "stream": True}, "streamed"),
        ({"messages": HELLO, "tools": [{"type": "function", "function": {}}]}, "s name"),
    ],
)
async def test_what_cannot_be_served_is_said(
    client: Client, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        await client.openai.post("/chat/completions", body={"model": "m", **body}, cast_to=object)
    assert client.session.fault is None
