"""``tool_choice`` and ``response_format``: what is required of an answer is checked, or constrained
by SGLang.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from agent_parts import ScriptedEngine, make_tokenizer
from call_forms import FORMS, TOOLS
from make_args import make_args, rule_problems
from test_agent_tools import ADD, CALL, QUESTION, Scripted

from slime.data.reasoning import THINK
from slime.plugins.agents.demands import Demand, demand_of, structural_tag
from slime.plugins.agents.messages import ApiError, guarded
from slime.plugins.agents.server import DIALECTS, AgentServer
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
    ask = guarded(DIALECTS[path].read, {**BODIES[path], **more})
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
        ("chat/completions", {"tool_choice": {"type": "function"}}, "each function"),
        (
            "chat/completions",
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "allowed_tools must",
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
    with pytest.raises(ApiError) as refused:
        guarded(DIALECTS[path].read, {**BODIES[path], **more})
    assert refused.value.status == 400 and words in refused.value.message


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
    with pytest.raises(ApiError, match="cannot be used") as refused:
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
        assert all("structural_tag" not in body["sampling_params"] for body in engine.bodies)
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


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_constrained_answers_are_trained_only_by_name(
    endpoint: AgentServer, checkpoint: Path, allowed: bool, stream: bool
) -> None:
    script = [("<tool_call>\n{", {"type": "abort"}), CALL, "Sure."]
    async with ScriptedEngine(make_tokenizer(), script) as engine:
        talk = Scripted(endpoint, checkpoint, engine)
        talk.session.settings = dataclasses.replace(
            talk.session.settings, agent_constrained_decoding=True
        )
        talk.args.allow_truncated_sampling, talk.args.rollout_backend = allowed, "sglang"
        create = talk.openai.chat.completions.create
        fixed: dict[str, Any] = {"model": "m", "tools": CHAT_TOOLS}
        answer = await create(messages=QUESTION, tool_choice="required", stream=stream, **fixed)  # type: ignore[call-overload]
        if stream:
            deltas = [chunk.choices[0].delta async for chunk in answer]
            assert "".join(delta.content or "" for delta in deltas) == "Let me see.\n", (
                "nothing of what was interrupted"
            )
        (turn,) = talk.session.tree.turns.values()
        said = {
            "role": "assistant",
            "content": turn.answer["content"],
            "tool_calls": turn.answer["tool_calls"],
        }
        said["tool_calls"][0]["function"]["arguments"] = json.dumps(
            said["tool_calls"][0]["function"]["arguments"]
        )
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
        await create(messages=[*QUESTION, said, result], **fixed)
    first, again, free = engine.bodies
    tag = json.loads(first["sampling_params"]["structural_tag"])
    assert tag["format"]["tags"][0]["begin"] == '<tool_call>\n{"name": "add", "arguments": '
    assert again == first | {"rid": again.get("rid")} if "rid" in again else again == first, (
        "it begins anew"
    )
    assert "structural_tag" not in free["sampling_params"]
    sample = talk.sample()
    trained = [
        token
        for token, kept in zip(
            sample.tokens[-sample.response_length :], sample.loss_mask, strict=True
        )
        if kept
    ]
    text = talk.state.tokenizer.decode(trained)
    assert text == (f"{CALL}<|end|>Sure.<|end|>" if allowed else "Sure.<|end|>")
    assert len(sample.weight_versions) == 2


def test_a_form_without_a_grammar_is_checked_only() -> None:
    assert structural_tag(Demand(calls=True), "pythonic", TOOLS, None, False) is None
    assert structural_tag(Demand(schema=SCHEMA), "pythonic", [], None, False) == {
        "type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "problem", "notice"),
    [
        ({"agent_constrained_decoding": False, "rollout_backend": "embedded"}, None, None),
        ({"rollout_backend": "embedded"}, "only SGLang supports constraints", None),
        ({"rollout_backend": "sglang"}, None, "are not trained (loss mask 0)"),
        (
            {"rollout_backend": "sglang", "allow_truncated_sampling": True},
            None,
            "importance ratios are wrong",
        ),
        ({"rollout_backend": "sglang", "debug_rollout_only": True}, None, None),
    ],
)
def test_the_flag(flags: dict[str, Any], problem: str | None, notice: str | None) -> None:
    args = make_args(**{"agent_constrained_decoding": True, **flags})
    problems = rule_problems(args)
    assert [problem in text for text in problems if problem] == [True] * (problem is not None)
    assert [notice in text for text in args.notices if notice] == [True] * (notice is not None)


@pytest.mark.sglang
def test_xgrammar_takes_each_form() -> None:
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string as accepts

    seen = set()
    for name, parser, text, calls in FORMS:
        required = structural_tag(Demand(calls=True), parser, TOOLS, THINK, False)
        # other spellings, which parsers read as well
        if required is None or name in ("hermes, two", "llama 3, tag"):
            continue
        seen.add(parser)
        body = text.removeprefix("I look.").lstrip()
        grammar = xgrammar.Grammar.from_structural_tag(json.dumps(required))
        assert accepts(grammar, body) and accepts(grammar, f"<think>x\n</think>\n\n{body}"), name
        assert not accepts(grammar, "hello") and not accepts(grammar, ""), name
        only = structural_tag(Demand(True, ("get_time",)), parser, TOOLS, THINK, True)
        grammar = xgrammar.Grammar.from_structural_tag(json.dumps(only))
        assert not accepts(grammar, f"so</think>{body}") and "get_weather" in [
            entry[0] for entry in calls
        ], name
        either = structural_tag(Demand(schema=SCHEMA), parser, TOOLS, None, False)
        grammar = xgrammar.Grammar.from_structural_tag(json.dumps(either))
        assert (
            accepts(grammar, '{"a": 1}')
            and accepts(grammar, body)
            and not accepts(grammar, '{"a": "x"}')
        ), name
        free = structural_tag(Demand(False, ("get_time",)), parser, TOOLS, None, False)
        grammar = xgrammar.Grammar.from_structural_tag(json.dumps(free))
        assert accepts(grammar, "any text"), name
    assert seen == {
        "qwen25",
        "glm45",
        "glm47",
        "deepseekv3",
        "deepseekv31",
        "kimi_k2",
        "llama3",
        "qwen3_coder",
    }


def test_demands_are_values() -> None:
    assert demand_of((False, None), None, TOOLS) is None
    assert demand_of((True, None), SCHEMA, TOOLS) == Demand(True, None, SCHEMA)
