"""Tool calls in each API, interrupted answers, and templates: with an engine that follows a script,
since a random model calls no tools."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from agent_parts import ScriptedEngine, arguments, make_tokenizer
from aiohttp import web

from slime.config.hooks import HookError
from slime.data.sample import Sample
from slime.plugins.agents.chat import ChatTemplate
from slime.plugins.agents.server import AgentServer
from slime.plugins.agents.tool_formats import Hermes
from slime.plugins.agents.tool_parsers import Shown, tool_parser
from slime.rollout.state import GenerateState

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
QUESTION = [{"role": "user", "content": "1 and 2?"}]
TEMPLATES = Path(__file__).parents[2] / "data" / "templates"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_tokenizer().save_pretrained(folder)
    return folder


class Scripted:
    """A session before a scripted engine."""

    def __init__(
        self, server: AgentServer, checkpoint: Path, engine: ScriptedEngine, **more: Any
    ) -> None:
        self.args = arguments(checkpoint, engine.url, **more)
        self.state = GenerateState(self.args)
        self.session = server.open(self.state, Sample(prompt="p"), self.state.sampling_params)
        url = server.url(self.session)
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0)

    def sample(self) -> Sample:
        (sample,) = self.session.tree.samples(self.state, self.session.sample)
        return sample


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_tools(endpoint: AgentServer, checkpoint: Path, stream: bool) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
    async with ScriptedEngine(make_tokenizer(), [CALL, "It is 3."]) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        create = talk.openai.chat.completions.create
        if stream:
            chunks = [
                c
                async for c in await create(model="m", messages=QUESTION, tools=tools, stream=True)
            ]  # type: ignore[call-overload]
            deltas = [chunk.choices[0].delta for chunk in chunks]
            text = "".join(delta.content or "" for delta in deltas)
            (entry,) = [call for delta in deltas for call in delta.tool_calls or []]
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
            assert text == "Let me see.\n" and sum(bool(delta.content) for delta in deltas) > 3
            said: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": [
                {"id": entry.id, "type": "function", "function": {"name": "add", "arguments": entry.function.arguments}}
            ]}  # fmt: skip
        else:
            answer = await create(model="m", messages=QUESTION, tools=tools)  # type: ignore[call-overload]
            said = answer.choices[0].message.model_dump()
            assert (
                answer.choices[0].finish_reason == "tool_calls" and said["content"] == "Let me see."
            )
            entry = answer.choices[0].message.tool_calls[0]
        assert json.loads(entry.function.arguments) == {"a": 1, "b": 2} and len(entry.id) == 9
        messages = [*QUESTION, said, {"role": "tool", "tool_call_id": entry.id, "content": "3"}]
        final = await create(model="m", messages=messages, tools=tools)  # type: ignore[call-overload]
        assert (
            final.choices[0].message.content == "It is 3."
            and final.choices[0].finish_reason == "stop"
        )
    text = talk.state.tokenizer.decode(talk.sample().tokens)
    asked, result = (
        "<|user|> 1 and 2?<|end|>\n[add ]<|assistant|> ",
        ("<|tool|> 3<|end|>\n[add ]<|assistant|> "),
    )
    assert text == f"{asked}{CALL}<|end|>\n{result}It is 3.<|end|>"
    assert (
        engine.bodies[1]["input_ids"] == talk.sample().tokens[: len(engine.bodies[1]["input_ids"])]
    )


async def test_a_call_that_the_model_repeats_has_another_id(
    endpoint: AgentServer, checkpoint: Path
) -> None:
    """Clients find the call of a result by its id. The same call after the same result has the same
    new tokens.
    """
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
    async with ScriptedEngine(make_tokenizer(), [CALL] * 3) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        talk.session.params["max_new_tokens"] = 900
        messages: list[Any] = list(QUESTION)
        for _ in range(3):
            answer = await talk.openai.chat.completions.create(
                model="m", messages=messages, tools=tools
            )
            said = answer.choices[0].message
            (entry,) = said.tool_calls or []
            messages += [said, {"role": "tool", "tool_call_id": entry.id, "content": "error"}]
    assert len({said.tool_calls[0].id for said in messages[1::2]}) == 3
    assert len(talk.session.tree.leaves()) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_tools(endpoint: AgentServer, checkpoint: Path, stream: bool) -> None:
    fixed: dict[str, Any] = {
        "model": "m", "max_tokens": 64, "tools": [{"name": "add", "description": "adds", "input_schema": ADD}]
    }  # fmt: skip
    async with ScriptedEngine(make_tokenizer(), [CALL, "It is 3."]) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        if stream:
            async with talk.anthropic.messages.stream(**fixed, messages=QUESTION) as events:  # type: ignore[arg-type]
                answer = await events.get_final_message()
        else:
            answer = await talk.anthropic.messages.create(**fixed, messages=QUESTION)
        assert answer.stop_reason == "tool_use" and [block.type for block in answer.content] == [
            "text",
            "tool_use",
        ]
        use: Any = answer.content[1]
        assert use.input == {"a": 1, "b": 2}
        result = {
            "type": "tool_result",
            "tool_use_id": use.id,
            "content": [{"type": "text", "text": "3"}],
        }
        messages: list[Any] = [
            *QUESTION,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
        ]
        final: Any = await talk.anthropic.messages.create(**fixed, messages=messages)
        assert final.content[0].text == "It is 3." and final.stop_reason == "end_turn"
    assert ("<|tool|> 3<|end|>\n<|user|> so?<|end|>") in talk.state.tokenizer.decode(
        talk.sample().tokens
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dropped", [False, True], ids=["kept", "dropped"])
async def test_an_empty_answer_in_messages(
    endpoint: AgentServer, checkpoint: Path, stream: bool, dropped: bool
) -> None:
    """Some clients drop empty blocks, and send a message without content."""
    async with ScriptedEngine(make_tokenizer(), ["", "two"]) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        fixed: Any = {"model": "m", "max_tokens": 9}
        if stream:
            async with talk.anthropic.messages.stream(**fixed, messages=QUESTION) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await talk.anthropic.messages.create(**fixed, messages=QUESTION)
        assert [block.text for block in answer.content] == [""]
        said = {"role": "assistant", "content": [] if dropped else answer.content}
        await talk.anthropic.messages.create(
            **fixed, messages=[*QUESTION, said, {"role": "user", "content": "Go on."}]
        )
    assert len(talk.session.tree.turns) == 2 and len(talk.session.tree.leaves()) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_tools(endpoint: AgentServer, checkpoint: Path, stream: bool) -> None:
    fixed: dict[str, Any] = {
        "model": "m",
        "tools": [{"type": "function", "name": "add", "parameters": ADD}],
    }
    async with ScriptedEngine(make_tokenizer(), [CALL, "It is 3."]) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        if stream:
            async with talk.openai.responses.stream(**fixed, input="1 and 2?") as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await talk.openai.responses.create(**fixed, input="1 and 2?")
        message, entry = answer.output
        assert message.content[0].text == "Let me see.\n" and entry.name == "add"
        assert json.loads(entry.arguments) == {"a": 1, "b": 2}
        result = {"type": "function_call_output", "call_id": entry.call_id, "output": "3"}
        items: list[Any] = [{"role": "user", "content": "1 and 2?"}, *answer.output, result]
        final = await talk.openai.responses.create(**fixed, input=items)
        assert final.output_text == "It is 3." and final.status == "completed"
        one, two = talk.session.tree.turns.values()
        assert two.parent is one


async def test_a_response_goes_on_from_its_own_reasoning(
    endpoint: AgentServer, checkpoint: Path
) -> None:
    """Two responses whose texts are equal are told apart by their ids."""
    script = ["<think>one way</think>3", "<think>the other</think>3", "sure"]
    async with ScriptedEngine(make_tokenizer(), script) as engine:
        talk = Scripted(endpoint, checkpoint, engine, agent_reasoning_parser="qwen3")
        create = talk.openai.responses.create
        first, second = [await create(model="m", input="1 and 2?") for _ in range(2)]
        assert first.output_text == second.output_text == "3"
        await create(model="m", input="sure?", previous_response_id=first.id)
    asked = talk.state.tokenizer.decode(engine.bodies[2]["input_ids"])
    assert "one way" in asked and "the other" not in asked
    one, two, three = talk.session.tree.turns.values()
    assert three.parent is one and not two.children


async def test_an_answer_that_an_engine_interrupts_goes_on(
    endpoint: AgentServer, checkpoint: Path
) -> None:
    """As a weight update does; the program sees one answer, the sample both versions."""
    script = [("Hel", {"type": "abort"}), ("", {"type": "abort"}), "lo."]
    async with ScriptedEngine(make_tokenizer(), script) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        answer = await talk.openai.chat.completions.create(model="m", messages=QUESTION)  # type: ignore[arg-type]
    assert (
        answer.choices[0].message.content == "Hello." and answer.choices[0].finish_reason == "stop"
    )
    sample = talk.sample()
    assert sample.weight_versions == ["1", "3"] and sample.status is Sample.Status.COMPLETED
    assert engine.bodies[2]["input_ids"] == sample.tokens[: len(engine.bodies[2]["input_ids"])]
    limits = [body["sampling_params"]["max_new_tokens"] for body in engine.bodies]
    assert (
        limits[1]
        == limits[2]
        == limits[0] - (len(engine.bodies[1]["input_ids"]) - len(engine.bodies[0]["input_ids"]))
    )


async def test_each_part_of_an_interrupted_answer_has_a_seed_of_its_own(
    endpoint: AgentServer, checkpoint: Path
) -> None:
    """An attempt without a token is no part."""
    abort = {"type": "abort"}
    async with ScriptedEngine(
        make_tokenizer(), [("", abort), ("He", abort), ("", abort), ("l", abort), "lo."]
    ) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        talk.session.params["sampling_seed"] = 5
        await talk.openai.chat.completions.create(model="m", messages=QUESTION)  # type: ignore[arg-type]
    seeds = [body["sampling_params"]["sampling_seed"] for body in engine.bodies]
    assert seeds[0] == seeds[1] and seeds[2] == seeds[3] and len(set(seeds)) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_that_an_interruption_divides_ends_an_answer(
    endpoint: AgentServer, checkpoint: Path, stream: bool
) -> None:
    script = [
        ("one</", {"type": "abort"}),
        ("end>and more", {"type": "stop", "matched": None}),
        "two",
    ]
    async with ScriptedEngine(make_tokenizer(), script) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        create = talk.openai.chat.completions.create
        answer: Any = await create(model="m", messages=QUESTION, stop=["</end>"], stream=stream)  # type: ignore[call-overload]
        if stream:
            deltas = [chunk.choices[0].delta.content async for chunk in answer]
            assert "".join(filter(None, deltas)) == "one"
        else:
            assert (
                answer.choices[0].message.content == "one"
                and answer.choices[0].finish_reason == "stop"
            )
        said = {"role": "assistant", "content": "one"}
        await create(model="m", messages=[*QUESTION, said, {"role": "user", "content": "and?"}])
    sample = talk.sample()
    text = talk.state.tokenizer.decode(sample.tokens[-sample.response_length :])
    assert (
        text.startswith("one</end>")
        and "more" not in text
        and sample.weight_versions == ["1", "2", "3"]
    )
    assert len(talk.session.tree.turns) == 2 and len(talk.session.tree.leaves()) == 1


async def test_stop_strings_end_a_turn_and_are_not_shown(
    endpoint: AgentServer, checkpoint: Path
) -> None:
    finish = {"type": "stop", "matched": "\n\n"}
    async with ScriptedEngine(make_tokenizer(), [("one", finish), "two"]) as engine:
        talk = Scripted(endpoint, checkpoint, engine, rollout_stop=["STOP"])
        answer = await talk.anthropic.messages.create(
            model="m",
            max_tokens=9,
            stop_sequences=["\n\n"],
            messages=QUESTION,  # type: ignore[arg-type]
        )
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "\n\n")
    sent = engine.bodies[0]["sampling_params"]
    assert (
        sent["stop"] == ["STOP", "\n\n"]
        and sent["no_stop_trim"] is False
        and sent["max_new_tokens"] == 9
    )


async def test_what_an_engine_refuses_reaches_the_program_and_what_breaks_stops_the_run(
    endpoint: AgentServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.engines.http._retries", 0)
    async with ScriptedEngine(
        make_tokenizer(), [("longer than the context length", 400), ("broken", 500)]
    ) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        with pytest.raises(openai.BadRequestError) as refused:
            await talk.openai.chat.completions.create(model="m", messages=QUESTION)  # type: ignore[arg-type]
        assert refused.value.code == "context_length_exceeded" and talk.session.fault is None
        with pytest.raises(openai.InternalServerError):
            await talk.openai.chat.completions.create(model="m", messages=QUESTION)  # type: ignore[arg-type]
    assert "broken" in str(talk.session.fault)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_rollout_that_ends_while_no_engine_can_be_reached(
    endpoint: AgentServer, checkpoint: Path, stream: bool
) -> None:
    async with ScriptedEngine(make_tokenizer(), [("no engine", 503)] * 100) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        asked = asyncio.ensure_future(
            talk.openai.chat.completions.create(model="m", messages=QUESTION, stream=stream)  # type: ignore[call-overload]
        )
        async with asyncio.timeout(60):
            while not engine.bodies:
                await asyncio.sleep(0.01)
            talk.state.aborted = True
            with pytest.raises(openai.InternalServerError, match="the rollout was aborted"):
                await asked
    assert talk.session.fault is None, "an error of an engine would end the run"


async def test_a_retry_of_the_client_library_is_one_turn(
    endpoint: AgentServer, checkpoint: Path
) -> None:
    """The first try gets no answer in time; the library leaves and asks again."""
    async with ScriptedEngine(make_tokenizer(), [None, *["Hello."] * 5]) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        patient = talk.openai.with_options(timeout=3.0, max_retries=5)
        answer = await patient.chat.completions.create(model="m", messages=QUESTION)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "Hello."
    counts = talk.session.counts
    assert counts["turns"] == len(talk.session.tree.turns) == 1 and counts["cancelled"] >= 1
    assert talk.sample().response == "Hello."


async def test_of_several_choices_none_is_trained_if_the_client_leaves_before_the_last(
    endpoint: AgentServer, checkpoint: Path
) -> None:
    async with ScriptedEngine(make_tokenizer(), ["Hello.", None, "Good day."]) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        asked = asyncio.ensure_future(
            talk.openai.chat.completions.create(model="m", messages=QUESTION, n=2)
        )  # type: ignore[call-overload]
        async with asyncio.timeout(20):
            while not talk.session.tree.turns or len(engine.bodies) < 2:
                await asyncio.sleep(0.01)
            asked.cancel()
            while talk.session.tasks:
                await asyncio.sleep(0.01)
        assert talk.session.tree.turns == {} and talk.session.counts["turns"] == 0
        await talk.openai.chat.completions.create(model="m", messages=QUESTION)  # type: ignore[arg-type]
    assert talk.sample().response == "Good day." and talk.session.counts["cancelled"] == 2


class DividingEngine(ScriptedEngine):
    """Ends its first answer after some of the bytes of a character, and sends the other bytes in
    the second one.
    """

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        ids, end = (
            self.tokenizer("so 中文", add_special_tokens=False)["input_ids"],
            self.tokenizer.eos_token_id,
        )
        count = next(
            n for n in range(len(ids)) if self.tokenizer.decode(ids[:n]).endswith("\ufffd")
        )
        first = len(self.bodies) == 1
        part, finish = (
            (ids[:count], {"type": "abort"})
            if first
            else ([*ids[count:], end], {"type": "stop", "matched": end})
        )
        chunk = self.answer(
            self.tokenizer.decode(part, skip_special_tokens=True), part, finish, body
        )
        if not body.get("stream"):
            return web.json_response(chunk)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")
        return response


async def test_a_character_that_an_interruption_divides_is_streamed_whole(
    endpoint: AgentServer, checkpoint: Path
) -> None:
    async with DividingEngine(make_tokenizer(), []) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        stream = await talk.openai.chat.completions.create(
            model="m", messages=QUESTION, stream=True
        )  # type: ignore[call-overload]
        said = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(said) == "so 中文" and "so " in said, (
        "a program goes on with the answer that was recorded"
    )
    assert talk.sample().response == "so 中文"


class FailingEngine(ScriptedEngine):
    """Sends the first five tokens of its first streamed answer, and then the error of an engine
    whose step failed.
    """

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self.bodies:
            return await super().generate(request)
        body = await request.json()
        self.bodies.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids = self.tokenizer("The sum is three.", add_special_tokens=False)["input_ids"][:5]
        part = self.answer(self.tokenizer.decode(ids), ids, None, body)
        for chunk in (part, {"error": {"message": "the step failed", "code": 500}}):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


async def test_a_streamed_answer_goes_on_where_its_engine_failed(
    endpoint: AgentServer, checkpoint: Path
) -> None:
    tokenizer = make_tokenizer()
    begun = tokenizer("The sum is three.", add_special_tokens=False)["input_ids"][:5]
    async with FailingEngine(tokenizer, [" and the rest."]) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        stream = await talk.openai.chat.completions.create(
            model="m", messages=QUESTION, stream=True
        )  # type: ignore[call-overload]
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert said == tokenizer.decode(begun) + " and the rest."
    assert engine.bodies[1]["input_ids"] == [*engine.bodies[0]["input_ids"], *begun], (
        "the client has these tokens"
    )
    assert talk.sample().response == said


def test_calls_that_cannot_be_read_stay_in_the_text() -> None:
    parser = Hermes()
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    bad = "<tool_call>{oops}</tool_call>"
    text, calls = parser.parse(f"a {bad} b {good}{good} c <tool_call> open")
    assert text == f"a {bad} b  c <tool_call> open" and [c["function"]["name"] for c in calls] == [
        "f",
        "f",
    ]


def test_parsers_by_name_and_path() -> None:
    assert tool_parser("none").parse("<tool_call>{}</tool_call>") == (
        "<tool_call>{}</tool_call>",
        [],
    )
    assert isinstance(tool_parser("slime.plugins.agents.tool_formats.Hermes"), Hermes)
    with pytest.raises(HookError):
        tool_parser("slime.plugins.agents.tool_parsers.Nothing")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("abc", "abc"), ("abc<", "abc"), ("abc<tool", "abc"), ("abc<tool_call>{", "abc"), ("a<b", "a<b"), ("xEN", "x"),
     ("xENDy", "x")],
)  # fmt: skip
def test_a_stream_holds_back_what_may_be_a_call_or_a_stop_string(text: str, expected: str) -> None:
    marks = ("<tool_call>", "END")
    one = Shown(marks)
    assert "".join(map(one.add, text)) == expected and Shown(marks).add(text) == expected


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("closed", [True, False])
def test_what_families_templates_add_between_turns(name: str, closed: bool) -> None:
    """For canonical answers the recorded ids and the continuation read as the template's own
    rendering.
    """
    source = (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer = make_tokenizer(source, ("<|im_end|>", "<|im_start|>"))
    template = ChatTemplate(tokenizer, {})
    tools = [
        {"type": "function", "function": {"name": "add", "description": "", "parameters": ADD}}
    ]
    asked = [{"role": "system", "content": "be brief"}, *QUESTION]
    answer = {"role": "assistant", "content": "It is 3."}
    after = [*asked, answer, {"role": "user", "content": "sure?"}]
    end = tokenizer.eos_token_id
    added = template.continuation(after, tools, 3, end if closed else 0)
    assert added is not None
    expected = (
        f"{'' if closed else '<|im_end|>'}\n"
        "<|im_start|>user\n"
        "sure?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.decode(added).removesuffix("<think>\n") == expected
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
    }
    result = {"role": "tool", "content": "3", "tool_call_id": "1"}
    added = template.continuation([*asked, {**answer, "tool_calls": [call]}, result], tools, 3, end)
    assert added is not None
    text = tokenizer.decode(added)
    assert (
        text.startswith("\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>")
        and "add" not in text
    )


def test_a_template_without_tools_gets_them_in_words() -> None:
    plain = "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }}<|end|>\n{% endfor %}"
    template = ChatTemplate(make_tokenizer(plain), {})
    tools = [
        {"type": "function", "function": {"name": "add", "description": "", "parameters": ADD}}
    ]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, *QUESTION]
    text = template.tokenizer.decode(template.prompt(messages, tools))
    assert text.startswith("<|system|> # Tools") and '"name": "add"' in text
    assert (
        '<|assistant|> <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>'
    ) in text


PHI_4 = (
    "{% for m in messages %}{% if m['role'] in ('system', 'user', 'assistant') %}"
    "<|{{ m['role'] }}|> {{ m['content'] }}<|end|>\n{% endif %}{% endfor %}"
)
GEMMA = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|{{ m['role'] }}|> {{ m['content'] | trim }}<|end|>\n{% endfor %}"
)


@pytest.mark.parametrize("source", [PHI_4, GEMMA, "glm4", "glm_z1", "deepseek_r1_distill", "qwen3"])
def test_results_of_tools_and_later_instructions_reach_the_model(source: str) -> None:
    """Some templates leave out results of tools, or refuse them, and some write a later system
    message before the first turn, where a continuation does not have it."""
    file = TEMPLATES / f"{source}.jinja"
    template = ChatTemplate(make_tokenizer(file.read_text() if file.is_file() else source), {})
    call = {"id": "000000001", "type": "function", "function": {"name": "f", "arguments": {}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    results = [
        {"role": "tool", "content": f"<{n}>", "tool_call_id": "000000001"} for n in ("one", "two")
    ]
    after = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "go on"}]
    messages = [*QUESTION, answer, *results, *after]
    added = template.continuation(messages, [], len(QUESTION) + 1, 0)
    assert added is not None
    for ids in (added, template.prompt(messages, [])):
        text = template.tokenizer.decode(ids)
        places = [text.find(word) for word in ("<one>", "<two>", "be kind", "go on")]
        assert -1 not in places and places == sorted(places)


def test_a_template_that_only_has_the_word_gets_tools_in_words() -> None:
    """Phi-4-mini's looks for tools in the system message."""
    source = PHI_4.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['tools'] }}")
    tools = [
        {"type": "function", "function": {"name": "add", "description": "", "parameters": ADD}}
    ]
    template = ChatTemplate(make_tokenizer(source), {})
    assert '"name": "add"' in template.tokenizer.decode(template.prompt([*QUESTION], tools))


def test_an_answer_that_the_program_began_is_continued() -> None:
    template = ChatTemplate(make_tokenizer(), {})
    ids = template.prompt([*QUESTION, {"role": "assistant", "content": "It is"}], [])
    assert template.tokenizer.decode(ids).endswith("<|assistant|> It is")
