"""``tool_choice`` and ``response_format``: what is required of an answer is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from agent_parts import ScriptedEngine, make_tokenizer
from call_forms import TOOLS
from test_agent_tools import ADD, CALL, QUESTION, Scripted

from slime.plugins.agents.demands import Demand, demand_of
from slime.plugins.agents.server import DIALECTS, AgentServer
from slime.plugins.http.server import Refused
from slime.types import JsonObject

CHAT_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": ADD}} for name in ("add", "sub")
]
FLAT_TOOLS = [{"type": "function", "name": name, "parameters": ADD} for name in ("add", "sub")]
CLAUDE_TOOLS = [{"name": name, "input_schema": ADD} for name in ("add", "sub")]
SCHEMA: JsonObject = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OBJECT: JsonObject = {"type": "object"}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FLAT_FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}
BODIES: dict[str, JsonObject] = {
    "chat/completions": {"messages": QUESTION, "tools": CHAT_TOOLS},
    "responses": {"input": QUESTION, "tools": FLAT_TOOLS},
    "messages": {"messages": QUESTION, "max_tokens": 64, "tools": CLAUDE_TOOLS},
}
ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "sub"}}]}
READ: list[tuple[str, JsonObject, Demand | None]] = [
    ("chat/completions", {"tool_choice": "auto", "response_format": {"type": "text"}}, None),
    ("chat/completions", {"tool_choice": "none"}, None),
    ("chat/completions", {"tool_choice": "required"}, Demand(calls=True)),
    ("chat/completions", {"tool_choice": CHAT_TOOLS[1]}, Demand(True, ("sub",))),
    (
        "chat/completions",
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
        Demand(False, ("sub",)),
    ),
    ("chat/completions", {"response_format": {"type": "json_object"}}, Demand(schema=OBJECT)),
    ("chat/completions", {"response_format": FORM}, Demand(schema=SCHEMA)),
    ("responses", {"tool_choice": "required", "text": {"verbosity": "low"}}, Demand(calls=True)),
    ("responses", {"tool_choice": {"type": "function", "name": "add"}}, Demand(True, ("add",))),
    (
        "responses",
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "add"}],
            }
        },
        Demand(True, ("add",)),
    ),
    ("responses", {"text": {"format": {"type": "json_object"}}}, Demand(schema=OBJECT)),
    ("responses", {"text": {"format": FLAT_FORM}}, Demand(schema=SCHEMA)),
    ("messages", {"tool_choice": {"type": "auto"}}, None),
    ("messages", {"tool_choice": {"type": "none"}}, None),
    ("messages", {"tool_choice": {"type": "any"}}, Demand(calls=True)),
    ("messages", {"tool_choice": {"type": "tool", "name": "add"}}, Demand(True, ("add",))),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        Demand(schema=SCHEMA),
    ),
    (
        "messages",
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        Demand(schema=SCHEMA),
    ),
]


@pytest.mark.parametrize(("path", "more", "demand"), READ)
def test_what_a_request_demands(path: str, more: JsonObject, demand: Demand | None) -> None:
    ask = DIALECTS[path].read({**BODIES[path], **more})
    assert ask.demand == demand


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        ("chat/completions", {"tool_choice": "required", "tools": []}, "function tools"),
        ("chat/completions", {"tool_choice": "sometimes"}, "tool_choice"),
        (
            "chat/completions",
            {"tool_choice": {"type": "function", "function": {"name": "mul"}}},
            "names 'mul'",
        ),
        ("chat/completions", {"tool_choice": {"type": "function"}}, "tool_choice.name"),
        (
            "chat/completions",
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "allowed_tools.mode",
        ),
        (
            "chat/completions",
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": 5}},
            "allowed_tools",
        ),
        ("chat/completions", {"response_format": "json"}, "response_format"),
        (
            "chat/completions",
            {"response_format": {"type": "grammar"}},
            "response_format.type must be",
        ),
        ("chat/completions", {"response_format": {"type": "json_schema"}}, "a schema"),
        (
            "chat/completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "integral"}},
                }
            },
            "JSON schema",
        ),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "schema": 5}}},
            "text.format: json_schema",
        ),
        ("responses", {"text": {"format": "json"}}, "text.format"),
        ("responses", {"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ("messages", {"tool_choice": {"type": "some"}}, "tool_choice.type"),
        (
            "messages",
            {"output_config": {"format": {"type": "xml"}}},
            "output_config.format.type must be",
        ),
    ],
)
def test_a_demand_that_nothing_could_meet_is_refused(
    path: str, more: JsonObject, words: str
) -> None:
    with pytest.raises(Refused) as refused:
        DIALECTS[path].read({**BODIES[path], **more})
    assert refused.value.status == 400 and words in str(refused.value)


@pytest.mark.parametrize(
    ("demand", "content", "called", "why"),
    [
        (Demand(calls=True), "3", [], "tool call"),
        (Demand(calls=True), "", ["mul"], None),
        (Demand(True, ("add",)), "", ["add", "add"], None),
        (Demand(True, ("add",)), "", ["add", "sub"], "tool_choice"),
        (Demand(False, ("add",)), "so", [], None),
        (Demand(schema=SCHEMA), ' {"a": 1}\n', [], None),
        (Demand(schema=SCHEMA), '{"a": 1} and so on', [], "Extra data"),
        (Demand(schema=SCHEMA), '{"a": "1"}', [], "at $.a: '1'"),
        (Demand(schema=SCHEMA), "NaN", [], "is not JSON"),
        (Demand(schema=SCHEMA), "[" * 5000, [], "nested"),
        (Demand(schema=OBJECT), "[]", [], "type 'object'"),
        (Demand(schema=OBJECT), "", ["add"], None),
        (Demand(schema=False), "1", [], "False schema"),
    ],
)
def test_what_meets_a_demand(
    demand: Demand, content: str, called: list[str], why: str | None
) -> None:
    said = demand.unmet(content, called)
    assert (said is None) if why is None else (said is not None and why in said), said


@pytest.mark.parametrize("reference", ["http://127.0.0.1:9/schema.json", "#/$defs/none", "#"])
def test_a_schema_that_cannot_be_used_is_the_clients_error(reference: str) -> None:
    with pytest.raises(Refused, match="cannot be used") as refused:
        Demand(schema={"$ref": reference}).unmet("{}", [])
    assert refused.value.status == 400


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_does_not_meet_it_is_an_error_and_stays_in_the_session(
    endpoint: AgentServer, checkpoint: Path, stream: bool
) -> None:
    async with ScriptedEngine(
        make_tokenizer(), ["It is 3.", CALL, ("It is", {"type": "length"}), "3"]
    ) as engine:
        talk = Scripted(endpoint, checkpoint, engine)

        async def ask(**more: Any) -> list[Any]:
            create = talk.openai.chat.completions.create
            answer = await create(
                model="m", messages=QUESTION, tools=CHAT_TOOLS, stream=stream, **more
            )  # type: ignore[call-overload]
            return [chunk async for chunk in answer] if stream else [answer]

        with pytest.raises(openai.APIError, match="tool_choice") as refused:
            await ask(tool_choice="required")
        assert refused.value.code == "answer_not_as_required"
        assert stream or getattr(refused.value, "status_code", None) == 422
        assert (await ask(tool_choice="required"))[-1].choices[0].finish_reason == "tool_calls"
        assert (await ask(tool_choice="required"))[-1].choices[0].finish_reason == "length", (
            "it was cut, and says so"
        )
        with pytest.raises(openai.APIError, match="the answer violates the JSON schema"):
            await ask(response_format=FORM)
        assert talk.session.counts["unmet"] == 2 and talk.session.counts["turns"] == 4
        assert talk.session.fault is None and talk.session.error is None
    samples = talk.session.tree.samples(talk.state, talk.session.sample)
    assert len(samples) == 4 and all(sample.effective_response_length for sample in samples), (
        "the model wrote them"
    )


@pytest.mark.parametrize("path", ["responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_other_apis_say_it_in_their_forms(
    endpoint: AgentServer, checkpoint: Path, path: str, stream: bool
) -> None:
    import aiohttp

    more = {"tool_choice": {"type": "any"} if path == "messages" else "required", "stream": stream}
    async with (
        ScriptedEngine(make_tokenizer(), ["It is 3."]) as engine,
        aiohttp.ClientSession() as client,
    ):
        talk = Scripted(endpoint, checkpoint, engine)
        url = f"{endpoint.url(talk.session)}/v1/{path}"
        async with client.post(url, json={"model": "m", **BODIES[path], **more}) as response:
            text = await response.text()
    assert response.status == (200 if stream else 422) and "tool call" in text
    assert "completed" not in text and "message_stop" not in text


def test_demands_are_values() -> None:
    assert demand_of((False, None), None, TOOLS) is None
    assert demand_of((True, None), SCHEMA, TOOLS) == Demand(True, None, SCHEMA)
