"""Separate the reasoning (``<think>…</think>`` at the beginning of a text) from the answer, also while it streams."""

from __future__ import annotations

from slime.data.reasoning import Tags
from slime.plugins.agents.messages import ToolCall
from slime.plugins.agents.tool_parsers import Shown, ToolParser, overlap


def split_reasoning(text: str, tags: Tags | None, opened: bool) -> tuple[str, str]:
    """Split a complete text into reasoning and answer.

    Args:
        opened: Whether the prompt ends with the start tag of the reasoning.
    """
    if tags is None:
        return "", text
    said = text.lstrip()
    if not opened and not said.startswith(tags.start):
        return "", text
    reasoning, found, answer = said.removeprefix(tags.start).partition(tags.end)
    return reasoning.strip(), answer.lstrip() if found else ""


def parse_answer(parser: ToolParser, text: str, tags: Tags | None) -> tuple[str, list[ToolCall]]:
    """Parse the tool calls of an answer, but ignore calls inside reasoning tags: the model only considers them there.

    A start tag that occurs inside a call, for example in an argument, does not begin reasoning."""
    if tags is None:
        return parser.parse(text)
    kept: list[str] = []
    calls: list[ToolCall] = []
    while True:
        begin = text.find(tags.start)
        before = text if begin < 0 else text[:begin]
        content, found = parser.parse(before)
        if begin < 0 or _open_call(parser, content):  # the tag is part of a call
            content, found = (content, found) if begin < 0 else parser.parse(text)
            return "".join([*kept, content]), calls + found
        calls += found
        end = text.find(tags.end, begin)
        end = len(text) if end < 0 else end + len(tags.end)
        kept += [content, text[begin:end]]
        text = text[end:]


def _open_call(parser: ToolParser, content: str) -> bool:
    return any(mark in content for mark in parser.marks)


class StreamSplit:
    """Splits streamed text into reasoning and answer, with the same result as :func:`split_reasoning`.

    Args:
        shown: Filter for the text of the answer.
    """

    def __init__(self, tags: Tags | None, opened: bool, shown: Shown) -> None:
        self._tags, self._shown = tags, shown
        self._opened = opened
        # "begin": until it is known whether the text starts with reasoning. "reasoning": up to the end tag. "after":
        # whitespace after the end tag, which is dropped. "plain": the answer.
        self._state = "begin"
        self._held = ""
        self._said = False  # whether any reasoning was returned yet; whitespace before it is dropped

    def add(self, text: str) -> tuple[str, str]:
        """Add new text; return the reasoning and the answer text that can be passed on now."""
        if self._tags is None:
            return "", self._shown.add(text)
        text, self._held = self._held + text, ""
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
            reasoning, found, text = text.partition(self._tags.end)
            if not found:
                return self._think(reasoning), ""
            reasoning, self._state = self._trimmed(reasoning).rstrip(), "after"
        if self._state == "after":
            text = text.lstrip()
            self._state = "plain" if text else "after"
        return reasoning, self._shown.add(text)

    def _think(self, text: str) -> str:
        """Return new reasoning that can be passed on. Trailing whitespace, and text that may be the beginning of the
        end tag, are held back until more text arrives."""
        assert self._tags is not None
        text = self._trimmed(text)
        keep = overlap(text, self._tags.end)
        body = text[: len(text) - keep].rstrip()
        self._held = text[len(body) :]
        self._said = self._said or bool(body)
        return body

    def _trimmed(self, text: str) -> str:
        return text if self._said else text.lstrip()
