"""The flags of agents, and what a program may return."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_args import rule_problems

from slime.config.args import Args
from slime.config.hf_config import read_chat_template
from slime.config.resolve import resolve_defaults
from slime.config.rules import Run
from slime.data.reasoning import TAGS
from slime.plugins.agents.config import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    choose_parser,
    resolve,
    sglang_parsers,
)
from slime.plugins.agents.program import Task, reward_of
from slime.plugins.agents.tool_formats import FORMATS
from slime.plugins.agents.tool_parsers import tool_parser


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"agent_function_path": "mine:run"}, None),
        ({"agent_command": "node agent.js"}, None),
        ({"agent_command": "a", "custom_generate_function_path": "mine:generate"}, None),
        (
            {"custom_generate_function_path": "slime.plugins.agents.rollout.generate"},
            "--agent-function-path or --agent-command",
        ),
        (
            {"agent_command": "a", "agent_function_path": "b:c"},
            "--agent-function-path b:c and --agent-command a",
        ),
    ],
)
def test_flags(flags: dict[str, Any], problem: str | None) -> None:
    args = Args(**flags)
    assert resolve_defaults(Run(args)) == []
    problems = [text for text in rule_problems(args) if "agent" in text]
    assert [problem in text for text in problems] == [True] * (problem is not None)  # type: ignore[operator]
    own = flags.get("custom_generate_function_path")
    assert args.custom_generate_function_path == (own or "slime.plugins.agents.rollout.generate")


def test_the_checks_know_the_names_of_all_parsers() -> None:
    assert set(TOOL_PARSERS) == FORMATS.keys()
    assert set(REASONING_PARSERS) == TAGS.keys()


@pytest.mark.parametrize(
    "name", ["auto", *TOOL_PARSERS, "slime.plugins.agents.tool_formats.Hermes"]
)
def test_parsers_that_exist_are_accepted(name: str) -> None:
    assert resolve(Args(agent_tool_parser=name)) == []
    assert tool_parser(choose_parser(name, "", None)).parse("no call") == ("no call", [])


@pytest.mark.parametrize("name", ["auto", "none", *REASONING_PARSERS])
def test_reasoning_parsers_that_exist_are_accepted(name: str) -> None:
    assert resolve(Args(agent_reasoning_parser=name)) == []


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"agent_tool_parser": "qwen26"}, ("--agent-tool-parser qwen26", *TOOL_PARSERS)),
        (
            {"agent_tool_parser": "slime.plugins.agents.tool_formats.Hermss"},
            ("--agent-tool-parser", "has no 'Hermss'"),
        ),
        (
            {"agent_tool_parser": "slime.plugins.agents.tool_formats.FORMATS"},
            ("it is a dict, not a function",),
        ),
        (
            {"agent_reasoning_parser": "qwen4"},
            ("--agent-reasoning-parser qwen4", "auto", *REASONING_PARSERS),
        ),
    ],
)
def test_a_parser_that_does_not_exist_is_found_before_the_start(
    flags: dict[str, Any], parts: tuple[str, ...]
) -> None:
    (problem,) = resolve(Args(**flags))
    assert all(part in problem for part in parts), problem


MARKED = "{% if tools %}<tool_call>{% endif %}"


@pytest.mark.parametrize(
    ("model_type", "template", "flags", "parts"),
    [
        (
            "deepseek_v32",
            "{{ tools }}",
            {},
            ("--agent-tool-parser auto", "deepseek_v32", "SGLang", "deepseekv31"),
        ),
        ("deepseek_v32", MARKED, {}, ()),
        ("deepseek_v32", "{{ tools }}", {"agent_tool_parser": "deepseekv31"}, ()),
        ("llama", "{{ tools }}", {}, ()),
        ("llama", None, {}, ("--hf-checkpoint", "no chat template")),
        ("llama", "", {}, ("--hf-checkpoint", "no chat template")),
    ],
)
def test_what_auto_stands_for_is_found_before_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    template: str | None,
    flags: dict[str, Any],
    parts: tuple[str, ...],
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)  # no SGLang, also where the tests run with it
    sglang_parsers.cache_clear()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    args = Args(hf_checkpoint=str(tmp_path), agent_command="node agent.js", **flags)
    problems = resolve_defaults(Run(args))
    assert len(problems) == bool(parts) and all(part in problems[0] for part in parts), problems
    args.custom_generate_function_path = "mine:generate"
    sglang_parsers.cache_clear()
    assert resolve(args) == [], "only what serves agents needs the parser"


@pytest.mark.parametrize("kind", ["file", "named file", "list", "text"])
def test_the_chat_template_is_read_as_transformers_does(tmp_path: Path, kind: str) -> None:
    from agent_parts import make_tokenizer
    from transformers import AutoTokenizer

    tokenizer = make_tokenizer(MARKED)
    if kind == "named file":
        tokenizer.chat_template = {"default": "plain", "tool_use": MARKED}
    tokenizer.save_pretrained(tmp_path, save_jinja_files=kind.endswith("file"))
    if kind == "list":
        file = tmp_path / "tokenizer_config.json"
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": MARKED}]
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": named}))
    loaded = str(AutoTokenizer.from_pretrained(tmp_path).chat_template)
    read = read_chat_template(str(tmp_path))
    assert (
        MARKED in loaded
        and read is not None
        and MARKED in read
        and ("plain" in read) == ("plain" in loaded)
    )
    (tmp_path / "tokenizer_config.json").unlink()
    assert read_chat_template(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("value", "reward"),
    [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (None, None), ({"a": 1}, {"a": 1})],
)
def test_rewards(value: Any, reward: Any) -> None:
    assert reward_of(value, "f") == reward


def test_what_is_no_reward_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"mine\.py.*str"):
        reward_of("1.0", "mine.py")


def test_both_client_libraries_find_the_endpoint_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from anthropic import Anthropic
    from openai import OpenAI

    task = Task("q", "a", {}, "http://127.0.0.1:1/s/x/v1", "http://127.0.0.1:1/s/x", "x")
    for name, value in task.environment().items():
        monkeypatch.setenv(name, value)
    assert str(OpenAI().base_url).rstrip("/") == task.openai_base_url and OpenAI().api_key == "x"
    assert (
        str(Anthropic().base_url).rstrip("/") == task.anthropic_base_url
        and Anthropic().api_key == "x"
    )


def test_an_sglang_without_the_registry_of_parsers_adds_none() -> None:
    """Another release may keep it elsewhere: a wrong name is then told as one, without a
    traceback.
    """
    assert sglang_parsers("json.decoder", "JSONDecoder.DetectorMap") == {}
    assert sglang_parsers("no_such_module", "X") == {}
