"""Checks of the flags of agents. The names of parsers stand here, so that a wrong one is found before any process
starts; ``slime.agent`` has the parsers themselves."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterable
from typing import Any

from slime.config.args import Args
from slime.config.validate_files import hook_problem

logger = logging.getLogger(__name__)
TOOL_PARSERS = (
    *("hermes", "qwen", "qwen25", "qwen3_coder", "step3p5", "glm", "glm45", "glm47", "deepseekv3", "deepseekv31"),
    *("kimi_k2", "llama3", "pythonic", "mistral", "none"),
)
REASONING_PARSERS = (
    *("deepseek-r1", "deepseek-v3", "glm45", "kimi_k2", "minimax", "qwen3", "qwen3-thinking", "step3", "step3p5"),
    *("interns1", "kimi", "mistral"),
)
SGLANG_TOOL_PARSERS = "sglang.srt.function_call.function_call_parser", "FunctionCallParser.ToolCallParserEnum"
SGLANG_REASONING_PARSERS = "sglang.srt.parser.reasoning_parser", "ReasoningParser.DetectorMap"


def check_parsers(args: Args) -> list[str]:
    """``--agent-tool-parser`` and ``--agent-reasoning-parser`` name a parser that exists."""
    problems = [
        tool_parser_problem(args.agent_tool_parser),
        reasoning_parser_problem(args.agent_reasoning_parser),
    ]
    return [problem for problem in problems if problem is not None]


def tool_parser_problem(name: str) -> str | None:
    """What is wrong with a value of ``--agent-tool-parser``; None where it can be used."""
    if name == "auto" or name in TOOL_PARSERS:
        return None
    if not is_path(name):
        if name in sglang_parsers(*SGLANG_TOOL_PARSERS):
            return None
        return _unknown("--agent-tool-parser", name, ("auto", *TOOL_PARSERS), SGLANG_TOOL_PARSERS)
    return hook_problem("--agent-tool-parser", "agent_tool_parser", name)


def reasoning_parser_problem(name: str) -> str | None:
    """What is wrong with a value of ``--agent-reasoning-parser``; None where it can be used."""
    if name in ("auto", "none", *REASONING_PARSERS) or name in sglang_parsers(*SGLANG_REASONING_PARSERS):
        return None
    return _unknown("--agent-reasoning-parser", name, ("auto", "none", *REASONING_PARSERS), SGLANG_REASONING_PARSERS)


def is_path(name: str) -> bool:
    """Whether a tool parser's name is a path to a class of the user's."""
    return any(mark in name for mark in "./:")


def _unknown(option: str, name: str, known: Iterable[str], registry: tuple[str, str]) -> str:
    more = sorted(set(sglang_parsers(*registry)) - set(known))
    of_sglang = f"the installed SGLang adds {', '.join(more)}" if more else "no SGLang can be imported to add others"
    return f"{option} {name}: there is no parser of this name; known are {', '.join(known)} ({of_sglang})"


@functools.cache
def sglang_parsers(module: str, attribute: str) -> dict[str, Any]:
    """A registry of the installed SGLang; empty where SGLang is absent or cannot be imported (it needs the packages
    of a GPU). The import takes seconds, so ask only for names that are not slime's own."""
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        logger.debug("no parsers of SGLang: %s", error)
        return {}
    for name in attribute.split("."):
        found = getattr(found, name)
    return dict(found)


AGENT_RULES = (check_parsers,)
