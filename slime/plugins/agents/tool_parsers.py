"""Read what the model wrote: its reasoning, its text and its tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from slime.config.hf_config import read_config
from slime.config.hooks import HookError, load_function
from slime.data.plain_values import parse_json
from slime.data.reasoning import Tags
from slime.types import Tokenizer

from .config import choose_parser, is_path, tool_parser_problem
from .messages import Tool, ToolCall, call
from .tool_formats import FORMATS

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
"""The description of tools that Hermes and Qwen models use, for chat templates that do not support
tools.
"""


class ToolParser(Protocol):
    """Interface of a tool parser. ``marks`` begin a call; while an answer streams, text from a mark
    on is held back.
    """

    marks: ClassVar[tuple[str, ...]]

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the text without its calls, and the calls as entries of ``tool_calls``, with the
        ids in the text if it has any."""


def tool_parser(name: str, tools: Sequence[Tool] = ()) -> ToolParser:
    """Return the parser of slime with this name, or else that of the installed SGLang, or else the
    class at this path.

    Args:
        tools: The tools of the request. Some forms write arguments as plain text, whose types are
            in the schemas.

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


def parser_name(setting: str, tokenizer: Tokenizer, checkpoint: str | None) -> str:
    """Return the parser that ``--agent-tool-parser`` means for a model."""
    model_type = (read_config(checkpoint) or {}).get("model_type") if checkpoint else None
    return choose_parser(setting, str(tokenizer.chat_template or ""), model_type)


class SGLangParser:
    """A parser of the installed SGLang, for forms without a parser in this package. As in SGLang,
    calls of unknown tools and the text after the first call are dropped."""

    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str, tools: Sequence[Tool]) -> None:
        from sglang.srt.entrypoints.openai.protocol import Tool as SGLangTool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        self._parser = FunctionCallParser([SGLangTool(**entry) for entry in tools], name)
        begins = getattr(self._parser.detector, "bot_token", "")
        self.marks = (begins.strip(),) if begins.strip() else ()  # type: ignore[misc]

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        rest, items = self._parser.parse_non_stream(text)
        calls = []
        for item in items:
            try:
                arguments = parse_json(item.parameters or "{}")
            except ValueError:
                arguments = None
            if not isinstance(arguments, dict) or not item.name:
                return text, []
            calls.append(call(item.name, arguments))
        return (rest, calls) if calls else (text, [])


class Shown:
    """Filters streamed text: it passes the text up to a mark, and holds back text that may become a
    mark.

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
                self._held = text
                self._ended = bool(text.strip())
                return ""
            self._opening = ()
        marks_at = [at for mark in self._marks if (at := text.find(mark)) >= 0]
        if marks_at:
            self._ended = True
            return text[: min(marks_at)]
        keep = max((overlap(text, mark) for mark in self._marks), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest proper prefix of ``mark`` with which ``text`` ends."""
    return next(
        (n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0
    )


def tools_in_words(tools: Sequence[Tool]) -> str:
    """Describe the tools for the system message of a model whose chat template does not support
    tools.
    """
    return HERMES_PREAMBLE.format(tools="\n".join(map(json.dumps, tools)))


# --- reasoning: `<think>…</think>` at the beginning of a text, also while it streams ---


def split_reasoning(text: str, tags: Tags | None, opened: bool) -> tuple[str, str]:
    """Split a complete text into reasoning and answer.

    Args:
        opened: Whether the prompt ends with the start tag of the reasoning.
    """
    if tags is None:
        return "", text
    body = text.lstrip()
    if not opened and not body.startswith(tags.start):
        return "", text
    reasoning, end, answer = body.removeprefix(tags.start).partition(tags.end)
    return reasoning.strip(), answer.lstrip() if end else ""


def parse_answer(parser: ToolParser, text: str, tags: Tags | None) -> tuple[str, list[ToolCall]]:
    """Parse the tool calls of an answer, but ignore calls inside reasoning tags: the model only
    considers them there.

    A start tag that occurs inside a call, for example in an argument, does not begin reasoning."""
    if tags is None:
        return parser.parse(text)
    kept: list[str] = []
    calls: list[ToolCall] = []
    while True:
        begin = text.find(tags.start)
        before = text if begin < 0 else text[:begin]
        content, new_calls = parser.parse(before)
        if begin < 0 or _open_call(parser, content):  # the tag is part of a call
            content, new_calls = (content, new_calls) if begin < 0 else parser.parse(text)
            return "".join([*kept, content]), calls + new_calls
        calls += new_calls
        end = text.find(tags.end, begin)
        end = len(text) if end < 0 else end + len(tags.end)
        kept += [content, text[begin:end]]
        text = text[end:]


def _open_call(parser: ToolParser, content: str) -> bool:
    return any(mark in content for mark in parser.marks)


class StreamSplit:
    """Splits streamed text into reasoning and answer, with the same result as
    :func:`split_reasoning`.

    Args:
        shown: Filter for the text of the answer.
    """

    def __init__(self, tags: Tags | None, opened: bool, shown: Shown) -> None:
        self._tags = tags
        self._shown = shown
        self._opened = opened
        # "begin": until it is known whether the text starts with reasoning. "reasoning": up to the
        # end tag. "after": whitespace after the end tag, which is dropped. "plain": the answer.
        self._state = "begin"
        self._held = ""
        # whether any reasoning was returned yet; whitespace before it is dropped
        self._said = False

    def add(self, text: str) -> tuple[str, str]:
        """Add new text; return the reasoning and the answer text that can be passed on now."""
        if self._tags is None:
            return "", self._shown.add(text)
        text = self._held + text
        self._held = ""
        if self._state == "begin":
            start = text.lstrip()
            if len(start) < len(self._tags.start) and self._tags.start.startswith(start):
                self._held = text
                return "", ""
            tagged = start.startswith(self._tags.start)
            self._state = "reasoning" if tagged or self._opened else "plain"
            text = start.removeprefix(self._tags.start) if tagged else text
        reasoning = ""
        if self._state == "reasoning":
            reasoning, end_tag, text = text.partition(self._tags.end)
            if not end_tag:
                return self._think(reasoning), ""
            reasoning = self._trimmed(reasoning).rstrip()
            self._state = "after"
        if self._state == "after":
            text = text.lstrip()
            self._state = "plain" if text else "after"
        return reasoning, self._shown.add(text)

    def _think(self, text: str) -> str:
        """Return new reasoning that can be passed on. Trailing whitespace, and text that may be the
        beginning of the end tag, are held back until more text arrives."""
        assert self._tags is not None
        text = self._trimmed(text)
        keep = overlap(text, self._tags.end)
        body = text[: len(text) - keep].rstrip()
        self._held = text[len(body) :]
        self._said = self._said or bool(body)
        return body

    def _trimmed(self, text: str) -> str:
        return text if self._said else text.lstrip()
