"""Nothing that a model writes or a client sends ends a run: it is answered, and only an engine's
fault is a fault.
"""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from agent_parts import ScriptedEngine, arguments, make_tokenizer
from needs import of_all

from slime.data.reasoning import THINK
from slime.data.sample import Sample
from slime.observability.samples import write_samples
from slime.plugins.agents import messages as common
from slime.plugins.agents.anthropic_api import Messages
from slime.plugins.agents.chat import ChatTemplate
from slime.plugins.agents.conversation import tool_calls
from slime.plugins.agents.messages import Ask, call, fold_system
from slime.plugins.agents.openai_api import Chat, Responses
from slime.plugins.agents.server import AgentServer
from slime.plugins.agents.session import Session
from slime.plugins.agents.tool_formats import FORMATS
from slime.plugins.agents.tool_parsers import Shown, StreamSplit, parse_answer, split_reasoning
from slime.plugins.agents.trajectory import Tree, Turn
from slime.plugins.http.server import Refused, to_json
from slime.rollout.state import GenerateState

FUNCTION: dict[str, Any] = {
    "name": "a",
    "description": "",
    "parameters": {"type": "object", "properties": {}},
}
TOOLS = {
    "chat/completions": [{"type": "function", "function": FUNCTION}],
    "responses": [{"type": "function", **FUNCTION}],
    "messages": [{"name": "a", "input_schema": FUNCTION["parameters"]}],
}
DIALECTS: dict[str, Any] = {"chat/completions": Chat, "responses": Responses, "messages": Messages}
WRITTEN = {
    "an open call and a whole one": '<tool_call> {"name": "a", <tool_call>{"name": "a", "arguments": {}}</tool_call>',
    "a repetition of brackets": '<tool_call>{"name": "a", "arguments": {"x": '
    + "[" * 1500
    + "</tool_call>",
    "deep but closed": '<tool_call>{"name": "a", "arguments": {"x": '
    + "[" * 300
    + "]" * 300
    + "}}</tool_call>",
    "half an emoji": '<tool_call>{"name": "a", "arguments": {"x": "\\ud83d"}}</tool_call>',
    "half an emoji in a key": '<tool_call>{"name": "a", "arguments": {"\\ud83d": 1}}</tool_call>',
    "a number of 30 digits": '<tool_call>{"name": "a", "arguments": {"x": '
    + "9" * 30
    + "}}</tool_call>",
    "no number": '<tool_call>{"name": "a", "arguments": {"x": NaN, "y": 1e999}}</tool_call>',
    "a name that is none": '<tool_call>{"name": ["a"], "arguments": {}}</tool_call>',
    "arguments that are none": '<tool_call>{"name": "a", "arguments": 5}</tool_call>',
    "nothing": "",
}


class Talk:
    """A session before a scripted engine, and plain HTTP."""

    def __init__(self, server: AgentServer, folder: Path, engine: ScriptedEngine) -> None:
        self.args = arguments(folder, engine.url)
        self.args.rollout_max_response_len = 8000
        self.state = GenerateState(self.args)
        self.session = server.open(self.state, Sample(prompt="p"), self.state.sampling_params)
        self.url = server.url(self.session)

    async def post(self, path: str, body: Any) -> tuple[int, bytes]:
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{self.url}/v1/{path}", json=body) as answer,
        ):
            return answer.status, await answer.read()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_tokenizer().save_pretrained(folder)
    return folder


def body_of(path: str, **more: Any) -> dict[str, Any]:
    said = (
        {"input": "hi"}
        if path == "responses"
        else {"messages": [{"role": "user", "content": "hi"}]}
    )
    return {"model": "m", **({"max_tokens": 7000} if path == "messages" else {}), **said, **more}


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        pytest.param(
            path, stream, marks=[pytest.mark.long] if stream and path != "chat/completions" else []
        )
        for path in DIALECTS
        for stream in (False, True)
    ],
)
async def test_whatever_the_model_writes_is_an_answer(
    endpoint: AgentServer, checkpoint: Path, tmp_path: Path, path: str, stream: bool
) -> None:
    async with ScriptedEngine(make_tokenizer(), list(WRITTEN.values())) as engine:
        talk = Talk(endpoint, checkpoint, engine)
        for name in WRITTEN:
            status, raw = await talk.post(path, body_of(path, tools=TOOLS[path], stream=stream))
            assert status == 200, (name, raw)
    assert (
        talk.session.fault is None
        and talk.session.error is None
        and len(talk.session.tree.turns) == len(WRITTEN)
    )
    samples = talk.session.tree.samples(talk.state, talk.session.sample)
    lines = write_samples(tmp_path, 0, samples).read_text().splitlines()
    assert len(lines) == len(samples) and all(map(json.loads, lines))


def test_calls_that_can_be_read_beside_those_that_cannot() -> None:
    calls = {name: FORMATS["hermes"]().parse(text)[1] for name, text in WRITTEN.items()}
    read = {
        name: [entry["function"]["arguments"] for entry in entries]
        for name, entries in calls.items()
        if entries
    }
    assert read == {
        "an open call and a whole one": [{}],
        "half an emoji": [{"x": "\ufffd"}],
        "half an emoji in a key": [{"\ufffd": 1}],
        "a number of 30 digits": [{"x": int("9" * 30)}],
    }


def test_a_generate_function_reads_the_same_calls_without_an_error() -> None:
    for text in WRITTEN.values():
        tool_calls(text)
    error = tool_calls(WRITTEN["a repetition of brackets"].replace("</tool", "]</tool"))[0].error
    # "nested too deeply"; the parser of Python 3.13 comes to a missing comma first.
    assert "not JSON" in error
    assert tool_calls('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>')[
        0
    ].arguments == {"x": 1}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"stop": 5}, "stop must"),
    ("chat/completions", {"stop": [5]}, "stop[0] must"),
    ("chat/completions", {"stream_options": ["x"]}, "stream_options"),
    ("chat/completions", {"tools": [{"type": "function", "function": "a"}]}, "a tool's function"),
    ("chat/completions", {"messages": [{"role": "user", "content": [1]}]}, "content parts"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"text": "a"}, None]}]},
        "content parts",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": {"text": "a"}}]},
        "content must",
    ),
    ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": True}]}, "tool_calls"),
    (
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]},
        "function must be an",
    ),
    ("chat/completions", {"tool_choice": 5}, "tool_choice must be"),
    ("chat/completions", {"response_format": {"format": "json"}}, "response_format.type must be"),
    ("chat/completions", {"max_tokens": 1.5}, "max_tokens"),
    ("chat/completions", {"max_tokens": True}, "max_tokens"),
    ("chat/completions", {"stream": "yes"}, "stream must"),
    (
        "responses",
        {"input": [{"type": "message", "role": "user", "content": {"text": "x"}}]},
        "content must",
    ),
    ("responses", {"input": 5}, "input must"),
    ("responses", {"input": [{"type": ["x"]}]}, "not supported"),
    ("messages", {"tool_choice": "auto"}, "tool_choice"),
    ("messages", {"stop_sequences": {"a": "b"}}, "stop_sequences"),
    ("messages", {"system": 5}, "system must"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]},
        "content must",
    ),
    ("messages", {"tools": [{"name": "a", "input_schema": "x"}]}, "input_schema"),
    (
        "messages",
        {"tools": [{"name": "a", "input_schema": json.loads("[" * 200 + "]" * 200)}]},
        "nested",
    ),
]


@pytest.mark.parametrize(("path", "more", "words"), REFUSED)
async def test_an_odd_request_is_refused_with_the_reason(
    endpoint: AgentServer, checkpoint: Path, path: str, more: dict[str, Any], words: str
) -> None:
    async with ScriptedEngine(make_tokenizer(), []) as engine:
        talk = Talk(endpoint, checkpoint, engine)
        status, raw = await talk.post(path, body_of(path, **more))
    assert status == 400 and words in json.loads(raw)["error"]["message"]
    assert talk.session.fault is None and talk.session.error is None


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "a", "input": {}}]}
CALLED = {"id": "1", "type": "function", "function": {"name": "a", "arguments": '{"x": '}}
SERVED: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"max_tokens": 10.0, "logprobs": True, "stop": ["", "END"]}, "<|user|> hi"),
    ("chat/completions", {"text": {"format": "x"}, "thinking": ["x"]}, "hi"),
    ("chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "data:,"}}]}]},
     "<|user|> see [image omitted]<|end|>"),
    ("chat/completions", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "<|user|> hi"),
    ("chat/completions", {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALLED]},
                                       {"role": "tool", "tool_call_id": "1", "content": "r"}]},
     '"_raw_arguments": "{\\"x\\": "'),
    ("chat/completions", {"messages": [{"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "function": {"name": "a", "arguments": '{"x": "\\ud83d"}'}}]}, {"role": "user", "content": "b"}]},
     "<|user|> b"),
    ("responses", {"tools": [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]}, "<|user|> hi"),
    ("responses", {"input": [{"type": None, "role": "user", "content": "hi"}]}, "<|user|> hi"),
    ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}, *TOOLS["messages"]]}, "[a ]"),
    ("messages", {"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "system", "content": "note"},
        {"role": "user", "content": "c"}]}, "<|user|> note\n\nc<|end|>"),
    ("messages", {"messages": [{"role": "user", "content": "a"}, USED, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}]}]}, "<|tool|> [image omitted]"),
    ("messages", {"messages": [{"role": "user", "content": [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "page"}}]}]}, "> page<"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "words"), SERVED)
async def test_what_real_clients_send_is_served(
    endpoint: AgentServer, checkpoint: Path, path: str, more: dict[str, Any], words: str
) -> None:
    async with ScriptedEngine(make_tokenizer(), ["ok"]) as engine:
        talk = Talk(endpoint, checkpoint, engine)
        status, raw = await talk.post(path, body_of(path, **more))
        assert status == 200, raw
    assert words in talk.state.tokenizer.decode(engine.bodies[0]["input_ids"])
    if "max_tokens" in more:
        sent = engine.bodies[0]["sampling_params"]
        assert sent["max_new_tokens"] == 10 and sent["stop"] == ["END"]


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_template_arguments_of_a_client_are_ignored_and_the_log_says_so(
    endpoint: AgentServer, checkpoint: Path, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    common._noted.clear()
    async with ScriptedEngine(make_tokenizer(), ["ok"]) as engine:
        talk = Talk(endpoint, checkpoint, engine)
        with caplog.at_level(logging.WARNING):
            status, raw = await talk.post(
                path, body_of(path, chat_template_kwargs={"enable_thinking": False})
            )
    assert status == 200, raw
    assert "'chat_template_kwargs'" in caplog.text and "--apply-chat-template-kwargs" in caplog.text


async def test_an_error_of_our_own_takes_the_sample_and_not_the_run(
    endpoint: AgentServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Session, ask: Ask) -> Any:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(Session, "prepare", broken)
    async with ScriptedEngine(make_tokenizer(), []) as engine:
        talk = Talk(endpoint, checkpoint, engine)
        status, raw = await talk.post("chat/completions", body_of("chat/completions"))
    assert status == 500 and b"a mistake" in raw
    assert talk.session.fault is None and isinstance(talk.session.error, ZeroDivisionError)


def test_a_conversation_of_3000_turns() -> None:
    """Deeper than Python's stack."""
    tree, messages = Tree(), []
    parent = None
    for number in range(3000):
        new = [{"role": "user", "content": str(number)}]
        answer = {"role": "assistant", "content": f"answer {number}"}
        meta = {"output_token_logprobs": [[-1.0, number, None]], "finish_reason": {"type": "stop"}}
        parent = Turn(parent, new, [], answer, [7], [{"text": "", "meta_info": meta}], str(number))
        tree.add(parent)
        messages += [*new, answer]
    assert tree.find(Ask([*messages, {"role": "user", "content": "more"}])) is parent
    assert parent is not None and len(parent.ids()) == 6000
    args = arguments(Path("none"))
    state = GenerateState(args)
    state.tokenizer = make_tokenizer()
    (sample,) = tree.samples(state, Sample(prompt="p"))
    assert sample.response_length == 5999 and len(sample.metadata["messages"]) == 6000


def test_system_messages_within_a_conversation_join_the_users() -> None:
    def say(letters: str) -> list[tuple[str, str]]:
        roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
        messages = [
            {"role": roles[letter], "content": f"{letter}{i}"} for i, letter in enumerate(letters)
        ]
        return [(m["role"][0], m["content"]) for m in fold_system(messages)]

    assert say("ssu") == [("s", "s0\n\ns1"), ("u", "u2")]
    assert say("usas") == [("u", "u0\n\ns1"), ("a", "a2"), ("u", "s3")]
    assert say("uassu") == [("u", "u0"), ("a", "a1"), ("u", "s2\n\ns3\n\nu4")]
    assert say("uatsa") == [("u", "u0"), ("a", "a1"), ("t", "t2"), ("u", "s3"), ("a", "a4")]


# --- random outputs and bodies ---------------------------------------------------------------

EXAMPLES = of_all(2000, 150)
PIECES = [
    *("<tool_call>", "</tool_call>", '{"name": "a", ', '"arguments": {', '"parameters": ', "}", "}}", "[", "]", '"'),
    *("\\ud83d", "\ud83d", "\u0000", "\u2028", "<think>", "</think>", "9" * 25, "1e999", "NaN", "null", "\\", "é"),
    *("<function=a>", "<parameter=x>", "</parameter>", "</function>", "<arg_key>x</arg_key>", "<arg_value>", "\n"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "[TOOL_CALLS]", "<|python_tag|>", "a(x=1)"),
    *("<|tool_call_begin|>", "functions.a:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "```json\n", ";"),
]  # fmt: skip
WHOLE = [
    *WRITTEN.values(),
    "<think>so</think>ok",
    '[a(x=1, y="z")]',
    '{"name": "a", "parameters": {"x": [1]}}',
]
VALUES = [
    None,
    True,
    0,
    -1,
    5,
    1.5,
    1e308,
    "",
    "x",
    "auto",
    [],
    [None],
    [1],
    ["x"],
    {},
    {"type": "x"},
    {"text": 5},
]


def random_text(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return "".join(rng.choices(PIECES, k=rng.randint(0, 12)))
    text = rng.choice(WHOLE)
    for _ in range(rng.randint(0, 4)):
        begin = rng.randint(0, len(text))
        text = (
            text[:begin]
            + rng.choice(PIECES) * rng.choice([0, 1, 1, 40])
            + text[rng.randint(begin, len(text)) :]
        )
    return text


def mutated(rng: random.Random, value: Any) -> Any:
    """A JSON value with one place exchanged, doubled or left out."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: mutated(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        return [*value[:at], mutated(rng, value[at]), *value[at + rng.choice([0, 1, 1]) :]]
    return rng.choice([*VALUES, [value], {"content": value}])


def example_bodies() -> list[tuple[str, dict[str, Any]]]:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {"role": "assistant", "content": "c", "tool_calls": [{**CALLED}]},
            {"role": "tool", "tool_call_id": "1", "content": "r"}]  # fmt: skip
    items = [{"role": "user", "content": "u"},
             {"type": "function_call", "name": "a", "arguments": "{}", "call_id": "1"},
             {"type": "function_call_output", "call_id": "1", "output": "r"}]  # fmt: skip
    blocks = [{"role": "user", "content": "u"}, USED, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "x", "content": [IMAGE, {"type": "text", "text": "t"}]}]}]  # fmt: skip
    more = {
        "stop": ["x"],
        "stream": False,
        "stream_options": {"include_usage": True},
        "n": 2,
        "tool_choice": "auto",
    }
    return [
        ("chat/completions", {**body_of("chat/completions", messages=chat, tools=TOOLS["chat/completions"]), **more}),
        ("responses", {**body_of("responses", input=items, tools=TOOLS["responses"]), "instructions": "i"}),
        ("messages", {**body_of("messages", messages=blocks, tools=TOOLS["messages"]), "system": "s",
                      "stop_sequences": ["x"], "tool_choice": {"type": "auto"}}),
    ]  # fmt: skip


@pytest.mark.more
def test_random_outputs_in_each_form_of_calls_and_each_api() -> None:
    rng = random.Random(0)
    for _ in range(EXAMPLES):
        # a tokenizer decodes to whole characters
        text = random_text(rng).encode(errors="replace").decode()
        for name, form in FORMATS.items():
            parser = form(TOOLS["chat/completions"])
            reasoning, answered = split_reasoning(text, THINK, opened=False)
            content, calls = parse_answer(parser, answered, THINK)
            assert isinstance(content, str) and isinstance(reasoning, str), name
            split = StreamSplit(THINK, False, Shown(parser.marks, parser.opening))
            parts = [split.add(text[i : i + 3]) for i in range(0, len(text), 3)]
            assert reasoning.startswith("".join(part for part, _ in parts)), (name, text)
            assert answered.startswith("".join(part for _, part in parts)), (name, text)
            answer = {
                "role": "assistant",
                "content": content,
                **({"tool_calls": calls} if calls else {}),
            }
            meta = {"output_token_logprobs": [[-1.0, 1, None]], "finish_reason": {"type": "stop"}}
            turn = Turn(None, [], [], answer, [1], [{"text": text, "meta_info": meta}], "1")
            for dialect in DIALECTS.values():
                ask = Ask([])
                json.loads(to_json(dialect.whole(ask, [turn])))
                encoder = dialect(ask)
                assert encoder.begin() + encoder.text(content) + encoder.end(turn)


@pytest.mark.more
def test_random_bodies_are_read_or_refused() -> None:
    rng, read, refused = random.Random(1), 0, 0
    template, examples = ChatTemplate(make_tokenizer(), {}), example_bodies()
    for _ in range(EXAMPLES):
        path, body = rng.choice(examples)
        for _ in range(rng.randint(1, 3)):
            body = mutated(rng, body)
        if not isinstance(body, dict):
            continue
        try:
            ask = DIALECTS[path].read(body)
            template.prompt(ask.messages, ask.tools)
            Tree().find(ask)
            read += 1
        except Refused as error:
            assert error.status == 400
            refused += 1
    assert read > EXAMPLES // 10 and refused > EXAMPLES // 10


def test_a_call_with_arguments_that_are_no_object_keeps_them() -> None:
    assert call("a", '{"x": ')["function"]["arguments"] == {"_raw_arguments": '{"x": '}
    assert call("a", "[1]")["function"]["arguments"] == {"_raw_arguments": "[1]"}
    assert call("a", "")["function"]["arguments"] == call("a", None)["function"]["arguments"] == {}
