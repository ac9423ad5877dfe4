"""Tool calls in a model's text. A registry by name; ``--agent-tool-parser`` may also name a class of the user's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

from slime.agent.messages import call
from slime.config.hooks import load_function
from slime.data.json_text import DECODER, clean, parse_json, too_deep

_START, _END = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_MOST_UNREADABLE = 256  # in one text, after which the rest is left as it is: a model that repeats itself

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

    def parse(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The text without its calls, and the calls as entries of ``tool_calls`` with an empty id."""


class Hermes:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many others.

    A call that cannot be read stays in the text, for the program to see.
    """

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>",)

    def parse(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        calls: list[dict[str, Any]] = []
        kept, done, start = [], 0, text.find(_START)
        unreadable = 0
        while start >= 0 and unreadable < _MOST_UNREADABLE:
            found = _read_block(text, start)
            unreadable += found is None
            if found is not None:
                end, entries = found
                calls += entries
                kept.append(text[done:start])
                done = end
            start = text.find(_START, found[0] if found is not None else start + 1)
        return "".join([*kept, text[done:]]), calls


def _read_block(text: str, start: int) -> tuple[int, list[dict[str, Any]]] | None:
    """Where the block that begins at ``start`` ends, and its calls; None for one that cannot be read."""
    begin = _SPACE.match(text, start + len(_START)).end()  # type: ignore[union-attr]
    try:
        value, end = DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    end = _SPACE.match(text, end).end()  # type: ignore[union-attr]
    found = read_calls(value)
    return (end + len(_END), found) if found is not None and text.startswith(_END, end) else None


def read_calls(value: Any) -> list[dict[str, Any]] | None:
    """The calls of a JSON value, an object or a list of them, in the forms that models write; None where it is none.

    The arguments are called ``arguments`` or ``parameters``, and may be JSON text.
    """
    calls = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str) or too_deep(item):
            return None
        arguments = item.get("arguments", item.get("parameters"))
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments)
            except ValueError:
                return None
        if not isinstance(arguments, dict | None):
            return None
        calls.append(call(clean(item["name"]), clean(arguments or {})))
    return calls or None


class NoCalls:
    """All is text."""

    marks: ClassVar[tuple[str, ...]] = ()

    def parse(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        return text, []


PARSERS: dict[str, type[ToolParser]] = {"hermes": Hermes, "none": NoCalls}


def tool_parser(name: str) -> ToolParser:
    """The parser of this name in the registry, or of this dotted path.

    Raises:
        HookError: neither.
    """
    return PARSERS[name]() if name in PARSERS else load_function(name)()


class Shown:
    """The part of a text under way that can be passed on: up to a mark, or to what may become one."""

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = [mark for mark in marks if mark]
        self._held = ""
        self._ended = False

    def add(self, text: str) -> str:
        """What new text lets pass."""
        if self._ended:
            return ""
        text = self._held + text
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
