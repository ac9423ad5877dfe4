"""Tool calls of each family, reasoning apart from answers, and what a client sees of both."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from agent_parts import CHAT, ScriptedEngine, make_tokenizer
from call_forms import FORMS, NO_CALLS, ONE, TOOLS
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import of_all
from test_agent_tools import QUESTION, Scripted

from slime.config.hooks import HookError
from slime.data.reasoning import THINK
from slime.plugins.agents import messages as common
from slime.plugins.agents import server as server_module
from slime.plugins.agents.config import choose_parser, reasoning_tags
from slime.plugins.agents.server import AgentServer
from slime.plugins.agents.tool_formats import FORMATS, Hermes
from slime.plugins.agents.tool_parsers import (
    Shown,
    StreamSplit,
    parse_answer,
    split_reasoning,
    tool_parser,
)

THINKING = CHAT.replace(
    "<|assistant|> {% endif %}",
    "<|assistant|> {% if think %}<think>\n{% endif %}{# </think> #}{% endif %}",
)


def named(calls: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [(entry["function"]["name"], entry["function"]["arguments"]) for entry in calls]


@pytest.mark.parametrize(
    ("parser", "text", "calls"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS]
)
def test_calls_of_each_family(parser: str, text: str, calls: Any) -> None:
    content, found = FORMATS[parser](TOOLS).parse(text)
    assert named(found) == calls and content.strip() in ("", "I look.")
    shown = Shown(FORMATS[parser].marks, FORMATS[parser].opening)
    assert content.startswith("".join(map(shown.add, text))), "a stream shows nothing of a call"


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("qwen3_coder", "<tool_call><function=f>%s</function></tool_call>"),
        ("glm45", "<tool_call>f%s</tool_call>"),
    ],
)
def test_arguments_whose_types_are_defined_elsewhere_in_the_schema(parser: str, text: str) -> None:
    """Pydantic writes the schema of nested models and of enumerations so."""
    definitions = {"Spot": {"type": "object", "properties": {"x": {"type": "integer"}}},
                   "Size": {"enum": ["1", "2"], "type": "string"}}  # fmt: skip
    parameters = {
        "$defs": definitions,
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/Spot"},
            "to": {"anyOf": [{"$ref": "#/$defs/Spot"}, {"type": "null"}]},
            "size": {"$ref": "#/$defs/Size"},
            "lost": {"$ref": "#/$defs/None/of/these"},
        },
    }
    one = (
        "<parameter=%s>%s</parameter>"
        if parser == "qwen3_coder"
        else "<arg_key>%s</arg_key><arg_value>%s</arg_value>"
    )
    values = {"at": '{"x": 1}', "to": '{"x": 2}', "size": "1", "lost": "?"}
    tools: list[Any] = [
        {"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}}
    ]
    _, found = FORMATS[parser](tools).parse(text % "".join(one % item for item in values.items()))
    assert named(found) == [("f", {"at": {"x": 1}, "to": {"x": 2}, "size": "1", "lost": "?"})]


@pytest.mark.parametrize(("parser", "text"), NO_CALLS)
def test_what_is_no_call_stays_text(parser: str, text: str) -> None:
    assert FORMATS[parser](TOOLS).parse(text) == (text, [])


READ_BY_SGLANG = """
from slime.plugins.sglang.kernels import install
install()
import json, sys
from call_forms import FORMS, TOOLS
from slime.plugins.agents.config import reasoning_tags
from slime.plugins.agents.tool_parsers import SGLangParser, tool_parser
from sglang.srt.parser.reasoning_parser import ReasoningParser
dsml, texts = json.loads(sys.argv[1])
parser = tool_parser("deepseekv32", TOOLS)
print("@@" + json.dumps({
    "forms": [SGLangParser(parser, TOOLS).parse(text) for _, parser, text, _ in FORMS],
    "dsml": [parser.marks, parser.parse(dsml), parser.parse("nothing")],
    "tags": reasoning_tags("minimax-m3", None),
    "reasoning": [ReasoningParser("qwen3").parse_non_stream(text) for text in texts],
}))
"""
DSML = (
    'I look.<｜DSML｜function_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city" '
    'string="true">Paris</｜DSML｜parameter><｜DSML｜parameter name="days" '
    'string="false">2</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>'
)
THOUGHTS = ["<think>so\n</think>\n\nanswer", "answer", "<think>open", "<think></think>x"]


@pytest.fixture(scope="module")
def read_by_sglang() -> Any:
    """In a process of its own: on a CPU SGLang needs stand-ins for packages that it imports."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    words = [sys.executable, "-c", READ_BY_SGLANG, json.dumps([DSML, THOUGHTS])]
    env = {**os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("@@")), None)
    assert line is not None, done.stderr[-3000:]
    return json.loads(line[2:])


@pytest.mark.sglang
@pytest.mark.timeout(400)
def test_sglangs_own_parsers_read_the_same(read_by_sglang: Any) -> None:
    for (name, parser, text, calls), (content, found) in zip(
        FORMS, read_by_sglang["forms"], strict=True
    ):
        assert [list(call) for call in named(found)] == [list(call) for call in calls], name
        assert content.strip() == FORMATS[parser](TOOLS).parse(text)[0].strip(), name


@pytest.mark.sglang
@pytest.mark.timeout(400)
def test_forms_that_only_sglang_knows_are_read_by_its_parsers(read_by_sglang: Any) -> None:
    marks, (content, calls), nothing = read_by_sglang["dsml"]
    assert (
        marks == ["<｜DSML｜function_calls>"]
        and content.strip() == "I look."
        and named(calls) == ONE
    )
    assert nothing == ["nothing", []] and read_by_sglang["tags"] == ["<mm:think>", "</mm:think>"]


@pytest.mark.sglang
@pytest.mark.timeout(400)
def test_sglangs_reasoning_parser_parts_the_same(read_by_sglang: Any) -> None:
    for text, (reasoning, answer) in zip(THOUGHTS, read_by_sglang["reasoning"], strict=True):
        assert split_reasoning(text, THINK, opened=False) == (
            (reasoning or "").strip(),
            (answer or "").strip(),
        ), text


def test_the_parser_by_template_and_model_type() -> None:
    def auto(template: str, model_type: str = "") -> str:
        return choose_parser("auto", template, model_type)

    assert auto("tools <tool_call>") == "hermes" and auto("no calls at all", "glm4_moe") == "hermes"
    assert (
        auto("tools <tool_call> <function=") == "qwen3_coder"
        and auto("tools <tool_call> <arg_key>") == "glm45"
    )
    assert (
        auto("tools <｜tool▁sep｜> ```json") == "deepseekv3"
        and auto("tools <｜tool▁sep｜>") == "deepseekv31"
    )
    assert (
        auto("tools", "kimi_k2") == "kimi_k2"
        and auto("tools", "llama") == "llama3"
        and auto("tools", "x") == "hermes"
    )
    assert choose_parser("mistral", "tools <tool_call>", None) == "mistral"
    templates = Path(__file__).parents[2] / "data" / "templates"
    assert auto((templates / "qwen3.jinja").read_text()) == "hermes"
    assert auto((templates / "qwen3_5.jinja").read_text()) == "qwen3_coder"


def test_a_name_that_is_no_parser() -> None:
    with pytest.raises(HookError, match="parser"):
        tool_parser("no-such-form")
    with pytest.raises(ValueError, match="--agent-reasoning-parser no-such"):
        reasoning_tags("no-such", make_tokenizer())
    assert (
        reasoning_tags("auto", make_tokenizer()) is None
        and reasoning_tags("auto", make_tokenizer(THINKING)) == THINK
    )


def test_what_is_only_thought_of_is_not_called() -> None:
    call = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    for text in (f"<think>I could {call} but no.</think>Done.", f"<think>I could {call}"):
        reasoning, answer = split_reasoning(text, THINK, opened=False)
        assert "rm" in reasoning and parse_answer(Hermes(), answer, THINK) == (answer, [])
    content, calls = parse_answer(
        Hermes(), f"Well. <think>{call}</think> {call} <think>{call}", THINK
    )
    assert len(calls) == 1 and content.count(call) == content.count("<think>" + call) == 2
    written = '<tool_call>{"name": "write", "arguments": {"text": "<think>a</think>"}}</tool_call>'
    assert named(parse_answer(Hermes(), written, THINK)[1]) == [
        ("write", {"text": "<think>a</think>"})
    ]


@settings(max_examples=of_all(300, 100), deadline=None)
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", " ", "\n", "a", "<th", "<tool_call>", "{}", "<"]),
        max_size=12,
    ),
    st.integers(1, 5),
    st.booleans(),
)
def test_a_stream_parts_as_the_whole_does(words: list[str], size: int, opened: bool) -> None:
    text = "".join(words)
    split = StreamSplit(THINK, opened, Shown(["<tool_call>"]))
    parts = [split.add(text[i : i + size]) for i in range(0, len(text), size)]
    reasoning, answer = split_reasoning(text, THINK, opened)
    assert reasoning.startswith("".join(part for part, _ in parts))
    assert answer.partition("<tool_call>")[0].startswith("".join(part for _, part in parts))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_tokenizer(THINKING).save_pretrained(folder)
    return folder


SAID = (
    "<think>\n"
    "add them\n"
    "</think>\n"
    "\n"
    'Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
)
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_in_chat(endpoint: AgentServer, checkpoint: Path, stream: bool) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
    async with ScriptedEngine(make_tokenizer(THINKING), [SAID, "It is 3."]) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        create = talk.openai.chat.completions.create
        if stream:
            chunks = [
                c
                async for c in await create(model="m", messages=QUESTION, tools=tools, stream=True)
            ]  # type: ignore[call-overload]
            deltas = [chunk.choices[0].delta for chunk in chunks]
            thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
            text = "".join(delta.content or "" for delta in deltas)
            (entry,) = [call for delta in deltas for call in delta.tool_calls or []]
            assert sum(bool(getattr(delta, "reasoning_content", None)) for delta in deltas) > 1
        else:
            message = (await create(model="m", messages=QUESTION, tools=tools)).choices[0].message  # type: ignore[call-overload]
            thought, text, entry = message.reasoning_content, message.content, message.tool_calls[0]
        assert (thought, text) == ("add them", "Let me see.") and json.loads(
            entry.function.arguments
        ) == {"a": 1}
        call = {
            "id": entry.id,
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1}'},
        }
        messages = [*QUESTION, {"role": "assistant", "content": text, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": entry.id, "content": "3"}]  # fmt: skip
        await create(model="m", messages=messages, tools=tools)  # type: ignore[call-overload]
    one, two = talk.session.tree.turns.values()
    assert two.parent is one, "a client that does not keep the reasoning goes on all the same"
    sent = talk.state.tokenizer.decode(engine.bodies[1]["input_ids"])
    assert SAID in sent, "and the model sees what it thought"
    assert engine.bodies[0]["sampling_params"]["skip_special_tokens"] is False


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [None, {"type": "enabled", "budget_tokens": 1024}])
async def test_reasoning_in_messages(
    endpoint: AgentServer, checkpoint: Path, stream: bool, thinking: Any
) -> None:
    more = {"thinking": thinking} if thinking else {}
    fixed: dict[str, Any] = {
        "model": "m",
        "max_tokens": 2000,
        "tools": [{"name": "add", "input_schema": ADD}],
        **more,
    }
    async with ScriptedEngine(make_tokenizer(THINKING), [SAID, "It is 3."]) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        talk.args.rollout_max_response_len = 3000
        if stream:
            async with talk.anthropic.messages.stream(**fixed, messages=QUESTION) as events:  # type: ignore[arg-type]
                seen = [event async for event in events]
                answer: Any = await events.get_final_message()
            assert seen[0].message.usage.input_tokens == len(engine.bodies[0]["input_ids"]) > 0  # type: ignore[union-attr]
        else:
            answer = await talk.anthropic.messages.create(**fixed, messages=QUESTION)
        kinds = ["thinking", "text", "tool_use"] if thinking else ["text", "tool_use"]
        assert [block.type for block in answer.content] == kinds and answer.content[
            -2
        ].text == "Let me see."
        if thinking:
            assert answer.content[0].thinking == "add them" and answer.content[0].signature
        result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "3"}
        messages: list[Any] = [*QUESTION, {"role": "assistant", "content": answer.content},
                               {"role": "user", "content": [result]}]  # fmt: skip
        await talk.anthropic.messages.create(**fixed, messages=messages)
    one, two = talk.session.tree.turns.values()
    assert two.parent is one


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_in_responses(
    endpoint: AgentServer, checkpoint: Path, stream: bool
) -> None:
    async with ScriptedEngine(make_tokenizer(THINKING), ["<think>hm</think>4", "5"]) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        fixed: dict[str, Any] = {"model": "m", "reasoning": {"effort": "low"}}
        if stream:
            async with talk.openai.responses.stream(**fixed, input="2+2?") as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await talk.openai.responses.create(**fixed, input="2+2?")
        thought, message = answer.output
        assert (
            thought.content[0].text == "hm" and message.content[0].text == "4" == answer.output_text
        )
        items: list[Any] = [
            {"role": "user", "content": "2+2?"},
            *answer.output,
            {"role": "user", "content": "+1?"},
        ]
        assert (await talk.openai.responses.create(model="m", input=items)).output_text == "5"
    one, two = talk.session.tree.turns.values()
    assert two.parent is one


async def test_a_template_that_opens_the_reasoning(endpoint: AgentServer, checkpoint: Path) -> None:
    async with ScriptedEngine(make_tokenizer(THINKING), ["hm\n</think>\n\nfour"]) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        talk.session.template.kwargs["think"] = True
        answer: Any = await talk.openai.chat.completions.create(model="m", messages=QUESTION)  # type: ignore[arg-type]
    assert (
        answer.choices[0].message.content == "four"
        and answer.choices[0].message.reasoning_content == "hm"
    )


async def test_calls_in_another_form_are_told_of(
    endpoint: AgentServer, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    common._noted.clear()
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
    async with ScriptedEngine(
        make_tokenizer(THINKING), ['[TOOL_CALLS]add[ARGS]{"a": 1}']
    ) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        with caplog.at_level(logging.WARNING):
            await talk.openai.chat.completions.create(model="m", messages=QUESTION, tools=tools)  # type: ignore[arg-type]
    assert talk.session.counts["unread_calls"] == 1
    assert any(
        "--agent-tool-parser hermes" in record.message and "[TOOL_CALLS]" in record.message
        for record in caplog.records
    )


async def streamed_message(url: str, pinged: asyncio.Event | None = None) -> bytes:
    """Return the bytes of a stream; ``pinged`` is set when they contain a ping."""
    body, raw = {"model": "m", "max_tokens": 9, "messages": QUESTION, "stream": True}, b""
    async with (
        aiohttp.ClientSession() as client,
        client.post(url, json=body) as response,
        asyncio.timeout(60),
    ):
        async for part in response.content.iter_any():
            raw += part
            if pinged is not None and b"event: ping" in raw:
                pinged.set()
    return raw


async def test_a_silent_stream_is_kept_alive(
    endpoint: AgentServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PING_SECONDS", 0.05)
    async with ScriptedEngine(make_tokenizer(THINKING), ["late"]) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        ask = talk.session.generate

        async def slowly(*args: Any) -> Any:
            await asyncio.sleep(0.3)
            return await ask(*args)

        talk.session.generate = slowly  # type: ignore[method-assign]
        raw = await streamed_message(f"{endpoint.url(talk.session)}/v1/messages")
    assert (
        b"event: ping" in raw
        and raw.index(b"message_start") < raw.index(b"ping")
        and b"message_stop" in raw
    )


async def test_a_stream_is_kept_alive_while_the_model_reasons_for_a_client_that_takes_no_reasoning(
    endpoint: AgentServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PING_SECONDS", 0.05)
    async with ScriptedEngine(make_tokenizer(THINKING), ["four"]) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        answer, pinged = talk.session.answer, asyncio.Event()

        async def after_reasoning(ask: Any, prepared: Any, on_part: Any) -> Any:
            while not pinged.is_set():
                on_part("hm", "")
                await asyncio.sleep(0.001)
            return await answer(ask, prepared, on_part)

        talk.session.answer = after_reasoning  # type: ignore[method-assign]
        raw = await streamed_message(f"{endpoint.url(talk.session)}/v1/messages", pinged)
    assert b"hm" not in raw and b"message_stop" in raw
