"""Select the parser of tool calls by its name: one of slime, of the installed SGLang, or a class of the user."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from slime.config.agent import is_path, tool_parser_problem
from slime.config.hooks import HookError, load_function
from slime.data.json_text import parse_json
from slime.plugins.agents.messages import Tool, ToolCall, call
from slime.plugins.agents.tool_formats import FORMATS

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
"""The description of tools that Hermes and Qwen models use, for chat templates that do not support tools."""


class ToolParser(Protocol):
    """Interface of a tool parser. ``marks`` begin a call; while an answer streams, text from a mark on is held back."""

    marks: ClassVar[tuple[str, ...]]

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the text without its calls, and the calls as entries of ``tool_calls``, with the ids in the text if it
        has any."""


def tool_parser(name: str, tools: Sequence[Tool] = ()) -> ToolParser:
    """Return the parser of slime with this name, or else that of the installed SGLang, or else the class at this path.

    Args:
        tools: The tools of the request. Some forms write arguments as plain text, whose types are in the schemas.

    Raises:
        HookError: There is no such parser.
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
    """A parser of the installed SGLang, for forms without a parser in this package. As in SGLang, calls of unknown
    tools and the text after the first call are dropped."""

    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str, tools: Sequence[Tool]) -> None:
        from sglang.srt.entrypoints.openai.protocol import Tool as SGLangTool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        self._parser = FunctionCallParser([SGLangTool(**entry) for entry in tools], name)
        begins = getattr(self._parser.detector, "bot_token", "")
        self.marks = (begins.strip(),) if begins.strip() else ()  # type: ignore[misc]

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
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
    """Filters streamed text: it passes the text up to a mark, and holds back text that may become a mark.

    Args:
        marks: Marks that end the text anywhere.
        opening: Marks that count only at the beginning of the text.
    """

    def __init__(self, marks: Iterable[str], opening: Iterable[str] = ()) -> None:
        self._marks = [mark for mark in marks if mark]
        self._opening = tuple(opening)
        self._held = ""
        self._ended = False

    def add(self, text: str) -> str:
        """Add new text; return the text that can be passed on now."""
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
    """Return the length of the longest proper prefix of ``mark`` with which ``text`` ends."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def tools_in_words(tools: Sequence[Tool]) -> str:
    """Describe the tools for the system message of a model whose chat template does not support tools."""
    return HERMES_PREAMBLE.format(tools="\n".join(map(json.dumps, tools)))
