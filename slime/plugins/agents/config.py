"""Flags of agents and environments, and the names of the parsers of what a model writes.

The parsers themselves are in :mod:`slime.plugins.agents.tool_parsers`; an unknown name is reported
before any process starts.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.files import read_json
from slime.config.flag import Section, flag, hook_flag
from slime.config.hf_config import model_config, read_chat_template
from slime.config.hooks import hook_problem
from slime.data.reasoning import ALL_TAGS, TAGS, Tags
from slime.types import Tokenizer

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)

AGENT_GENERATE = "slime.plugins.agents.rollout.generate"
ENVIRONMENT_SOURCE = "slime.plugins.agents.environments.source.EnvironmentSource"
ENVIRONMENT_GENERATE = "slime.plugins.agents.environments.rollout.generate"
MCP_GENERATE = "slime.plugins.agents.environments.mcp.generate"


_PARSERS = read_json(Path(__file__).parent / "parsers.json")
TOOL_PARSERS: list[str] = _PARSERS["tool_parsers"]
REASONING_PARSERS: list[str] = _PARSERS["reasoning_parsers"]
_BY_TEMPLATE: dict[str, str] = _PARSERS["tool_parser_by_template"]
"""Text in a chat template -> the form in which the model writes tool calls. The first match counts,
so a text that occurs in the templates of several forms comes after the more specific ones."""
_BY_MODEL: dict[str, str] = _PARSERS["tool_parser_by_model_type"]
SGLANG_TOOL_PARSERS = (
    "sglang.srt.function_call.function_call_parser",
    "FunctionCallParser.ToolCallParserEnum",
)


SGLANG_REASONING_PARSERS = "sglang.srt.parser.reasoning_parser", "ReasoningParser.DetectorMap"


@dataclass
class AgentConfig(Section):
    _title = "agents"

    agent_function_path: str | None = hook_flag()
    """Agent program as a function run(task), sync or async, that calls the model at
    task.openai_base_url or task.anthropic_base_url and returns a reward or None"""
    agent_command: str | None = None
    """Agent program as a command line: its environment has OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, SLIME_MODEL and SLIME_TASK (JSON)"""
    agent_env: list[str] | None = None
    """Names of environment variables that the program of --agent-command gets beside PATH, HOME,
    LANG, PYTHONPATH and the like. API keys and tokens are passed only if they are named here"""
    agent_timeout: float = flag(1800.0, above=0)
    """Deadline in seconds for an agent program; a sample that takes longer is left out"""
    agent_tool_parser: str = "auto"
    """Parser of tool calls in responses: auto (by the chat template, then by the model type),
    hermes, qwen25, qwen3_coder, glm45, glm47, deepseekv3, deepseekv31, kimi_k2, llama3, pythonic,
    mistral, none, a parser of the installed SGLang, or the path of the user's own class"""
    agent_reasoning_parser: str = "auto"
    """Parser that separates reasoning from the answer in responses: auto (by the chat template and
    the tokenizer), none, or a parser of SGLang such as qwen3, deepseek-r1, glm45, kimi_k2, kimi,
    mistral"""
    agent_host: str = "127.0.0.1"
    """Address of this machine at which agent programs reach the endpoint"""


@dataclass
class EnvironmentConfig(Section):
    _title = "environments"

    environment: str | None = flag(metavar="NAME:WHAT?KEY=VALUE")
    """Environment that brings prompts, rewards and turns: reasoning_gym:DATASET, gymnasium:ENV_ID,
    verifiers:TASKSET, openenv:URL, harbor:FOLDER, nemo_gym:URL or file.py:Class, with options after
    a question mark"""
    environment_timeout: float = flag(60.0, above=0)
    """Deadline in seconds for the beginning and each step of an episode of --environment, and for
    each call of a tool of --mcp-server"""
    mcp_server: list[str] | None = None
    """MCP servers whose tools the model may call: a command in quotes, sandbox:FILE.py, or an http
    URL
    """


def resolve(args: Args) -> list[str]:
    """Select the data source and the generate function of ``--environment``, ``--mcp-server`` or an
    agent program, and report parsers that do not exist. What the user chose stays, and the rules
    refuse it."""
    if args.environment is not None and "data_source_path" not in args.explicit:
        args.data_source_path = ENVIRONMENT_SOURCE
    for path, asked in (
        (ENVIRONMENT_GENERATE, args.environment),
        (MCP_GENERATE, args.mcp_server),
        (AGENT_GENERATE, args.agent_function_path or args.agent_command),
    ):
        if asked:
            args.fill(custom_generate_function_path=path)
    problems = [
        tool_parser_problem(args.agent_tool_parser),
        reasoning_parser_problem(args.agent_reasoning_parser),
        template_problem(args.hf_checkpoint, args.agent_tool_parser)
        if args.custom_generate_function_path == AGENT_GENERATE
        else None,
    ]
    return [problem for problem in problems if problem is not None]


def template_problem(checkpoint: str | None, tool_parser: str) -> str | None:
    """Explain why agents cannot use the chat template of ``--hf-checkpoint``; None if they can, or
    if the template cannot be read on this machine."""
    # A model of the hub that is not on this machine is checked when it has been loaded.
    template = read_chat_template(checkpoint) if checkpoint else None
    if template is None:
        return None
    if not template:
        return (
            f"--hf-checkpoint {checkpoint}: its tokenizer has no chat template, which agents need"
        )
    model_type = model_config(checkpoint).get("model_type")
    name = choose_parser(tool_parser, template, model_type)
    if tool_parser != "auto" or tool_parser_problem(name) is None:
        return None
    return (
        f"--agent-tool-parser auto: models of the type {model_type} need the parser {name}, which "
        "only SGLang has, and no SGLang with this parser can be imported: install SGLang, or set "
        f"--agent-tool-parser to one of {', '.join(TOOL_PARSERS)} or to the path of your own class"
    )


def choose_parser(name: str, template: str, model_type: str | None) -> str:
    """Resolve ``auto`` to the name of a tool parser: by the chat template, which shows the model
    how to write calls, or else by ``model_type``. Other names are returned as they are.

    If the template does not support tools, slime describes them in the prompt in the form of the
    Hermes models.
    """
    if name != "auto":
        return name
    if "tools" not in template:
        return "hermes"
    # The template shows the model how to write calls, so it knows better than the type of the
    # model.
    found = next((parser for mark, parser in _BY_TEMPLATE.items() if mark in template), None)
    return found or _BY_MODEL.get(model_type or "", "hermes")


def tool_parser_problem(name: str) -> str | None:
    """Explain why a value of ``--agent-tool-parser`` cannot be used; None if it can."""
    if is_path(name):
        return hook_problem("--agent-tool-parser", "agent_tool_parser", name)
    return _parser_problem(
        "--agent-tool-parser", name, ("auto", *TOOL_PARSERS), SGLANG_TOOL_PARSERS
    )


def reasoning_parser_problem(name: str) -> str | None:
    """Explain why a value of ``--agent-reasoning-parser`` cannot be used; None if it can."""
    known = ("auto", "none", *REASONING_PARSERS)
    return _parser_problem("--agent-reasoning-parser", name, known, SGLANG_REASONING_PARSERS)


def is_path(name: str) -> bool:
    """Whether the name of a tool parser is the path of a user's class."""
    return any(mark in name for mark in "./:")


def _parser_problem(
    option: str, name: str, known: Sequence[str], registry: tuple[str, str]
) -> str | None:
    if name in known or name in (others := sglang_parsers(*registry)):
        return None
    more = sorted(set(others) - set(known))
    of_sglang = (
        f"SGLang adds {', '.join(more)}" if more else "SGLang, which has others, cannot be imported"
    )
    return f"{option} {name}: there is no such parser; use one of {', '.join(known)} ({of_sglang})"


@functools.cache
def sglang_parsers(module: str, attribute: str) -> dict[str, Any]:
    """Return a parser registry of the installed SGLang.

    It is empty if SGLang is not installed, cannot be imported (it needs packages for GPUs), or has
    no such attribute. The import takes seconds, so call this only for names that slime does not
    have itself."""
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        logger.debug("the parsers of SGLang cannot be imported: %s", error)
        return {}
    return dict(found)


def reasoning_tags(name: str, tokenizer: Tokenizer) -> Tags | None:
    """Return the tags for ``--agent-reasoning-parser``; with ``auto``, those in the chat template
    or the tokenizer.

    Raises:
        ValueError: Neither slime nor the installed SGLang has a parser of this name.
    """
    if name == "none":
        return None
    if name == "auto":
        template = str(tokenizer.chat_template)
        return next((tags for tags in ALL_TAGS if _knows(tokenizer, template, tags)), None)
    if name in TAGS:
        return TAGS[name]
    problem = reasoning_parser_problem(name)
    if problem is not None:
        raise ValueError(problem)
    detector = sglang_parsers(*SGLANG_REASONING_PARSERS)[name]()
    return Tags(detector.think_start_token, detector.think_end_token)


def _knows(tokenizer: Tokenizer, template: str, tags: Tags) -> bool:
    token = tokenizer.convert_tokens_to_ids(tags.end)
    return tags.end in template or (token is not None and token != tokenizer.unk_token_id)
