"""Tool calls in a model's text. A registry by name; ``--agent-tool-parser`` may also name a class of the user's."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Protocol

from slime.agent.messages import call
from slime.config.hooks import load_function
from slime.rollout.multi_turn import tool_calls

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
    _block = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)

    def parse(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        calls = []

        def take(match: re.Match[str]) -> str:
            (found,) = tool_calls(match.group())
            if found.error:
                return match.group()
            calls.append(call(found.name, found.arguments))
            return ""

        return self._block.sub(take, text), calls


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


def shown(text: str, marks: tuple[str, ...]) -> str:
    """The part of a text under way that can be passed on: up to a mark, or to what may become one."""
    for mark in marks:
        text = text.partition(mark)[0]
        held = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
        text = text[: len(text) - held]
    return text
