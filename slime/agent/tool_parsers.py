"""Which parser reads the tool calls in a model's text: by name, by the chat template, or a class of the user's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from slime.agent.messages import Tool, ToolCall, call
from slime.agent.tool_formats import FORMATS
from slime.config.agent import is_path, tool_parser_problem
from slime.config.hooks import HookError, load_function
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


class ToolParser(Protocol):
    """``marks`` begin a call: a stream holds back what follows one."""

    marks: ClassVar[tuple[str, ...]]

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text without its calls, and the calls as entries of ``tool_calls``, with an id where the text has one."""


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
