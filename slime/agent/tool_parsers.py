"""Which parser reads the tool calls in a model's text: by name, by the chat template, or a class of the user's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

from slime.agent.messages import Tool, call
from slime.agent.tool_formats import FORMATS
from slime.config.hooks import HookError, load_function
from slime.config.validate_agent import is_path, tool_parser_problem
from slime.data.json_text import parse_json

HERMES_PREAMBLE = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""The Hermes and Qwen models' own words, for chat templates that know no tools."""
_BY_TEMPLATE = (  # what a template shows of the form in which its model calls tools; the first that is found
    ("<function=", "qwen3_coder"), ("<arg_key>", "glm45"), ("<|tool_call_argument_begin|>", "kimi_k2"),
    ("```json", "deepseekv3"), ("<｜tool▁sep｜>", "deepseekv31"), ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3"),
)  # fmt: skip
_BY_MODEL = {
    **{"glm4_moe": "glm45", "glm4_moe_lite": "glm47", "glm_moe_dsa": "glm47", "deepseek_v3": "deepseekv3"},
    **{"kimi_k2": "kimi_k2", "kimi_k25": "kimi_k2", "llama": "llama3", "llama4": "pythonic", "mistral": "mistral"},
    **{"mixtral": "mistral", "mistral3": "mistral", "ministral3": "mistral", "qwen3_next": "hermes"},
    **{"qwen3_5": "qwen3_coder", "qwen3_5_moe": "qwen3_coder", "deepseek_v32": "deepseekv32"},
}


class ToolParser(Protocol):
    """``marks`` begin a call: a stream holds back what follows one."""

    marks: ClassVar[tuple[str, ...]]

    def parse(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The text without its calls, and the calls as entries of ``tool_calls``, with an id where the text has one."""


def choose_parser(name: str, template: str, model_type: str | None) -> str:
    """The name behind ``auto``: by the chat template, which shows the model the form; then by ``model_type``.

    A template that knows no tools has them described in the words of the Hermes models.
    """
    if name != "auto":
        return name
    if "tools" not in template:
        return "hermes"
    found = next((parser for mark, parser in _BY_TEMPLATE if mark in template), None)
    return found or _BY_MODEL.get(model_type or "", "hermes")


def tool_parser(name: str, tools: Sequence[Tool] = ()) -> ToolParser:
    """The parser of this name in the registry, else in the installed SGLang, else of this dotted path.

    Args:
        tools: those of the request; some forms write arguments as bare text, and their types stand in the schemas.

    Raises:
        HookError: none of these.
    """
    if name in FORMATS:
        return FORMATS[name](tools)
    problem = tool_parser_problem(name)
    if problem is not None:
        raise HookError(problem)
    if not is_path(name):
        return SGLangParser(name, tools)
    parser: ToolParser = load_function(name)()
    return parser


class SGLangParser:
    """A parser of the installed SGLang, for forms that this package has none for. Calls of unknown tools are left out,
    and so is the text after the first call, as SGLang does."""

    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str, tools: Sequence[Tool]) -> None:
        from sglang.srt.entrypoints.openai.protocol import Tool as SGLangTool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        self._parser = FunctionCallParser([SGLangTool(**entry) for entry in tools], name)
        begins = getattr(self._parser.detector, "bot_token", "")
        self.marks = (begins.strip(),) if begins.strip() else ()  # type: ignore[misc]

    def parse(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        rest, found = self._parser.parse_non_stream(text)
        calls = []
        for item in found:
            try:
                arguments = parse_json(item.parameters or "{}")
            except ValueError:
                arguments = None
            if not isinstance(arguments, dict) or not item.name:
                return text, []
            calls.append(call(item.name, arguments))
        return (rest, calls) if calls else (text, [])


class Shown:
    """The part of a text under way that can be passed on: up to a mark, or to what may become one.

    Args:
        opening: marks at the beginning of the text alone.
    """

    def __init__(self, marks: Iterable[str], opening: Iterable[str] = ()) -> None:
        self._marks = [mark for mark in marks if mark]
        self._opening = tuple(opening)
        self._held = ""
        self._ended = False

    def add(self, text: str) -> str:
        """What new text lets pass."""
        if self._ended:
            return ""
        text = self._held + text
        if self._opening:
            if not text.strip() or text.lstrip().startswith(self._opening):
                self._held, self._ended = text, bool(text.strip())
                return ""
            self._opening = ()
        found = [at for mark in self._marks if (at := text.find(mark)) >= 0]
        if found:
            self._ended = True
            return text[: min(found)]
        keep = max((overlap(text, mark) for mark in self._marks), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, mark: str) -> int:
    """Characters at the end of ``text`` that ``mark`` begins with, less than all of it."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def tools_in_words(tools: Sequence[Tool]) -> str:
    """The tools for the system message of a model whose template knows none."""
    return HERMES_PREAMBLE.format(tools="\n".join(map(json.dumps, tools)))
