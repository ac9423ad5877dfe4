"""Parsers of the forms in which model families write tool calls, under the names that SGLang gives
its parsers.

A call that cannot be parsed stays in the text, so that the program sees it. The time is linear in
the length of the text, because the text of a model can be long and malformed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import ClassVar

from slime.data.plain_values import DECODER, MOST_NESTED, clean, parse_json, too_deep
from slime.types import JsonObject, JsonValue

from .messages import Tool, ToolCall, call

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[\w.\-/:]+")
# unreadable calls after which the rest stays text; a model may repeat one without end
_MOST_UNREADABLE = 256
_LONGEST_LIST = 100_000  # maximum number of characters of a pythonic list


class Format:
    """A form in which every call, or every list of calls, begins with a marker.

    ``marks`` begin a call anywhere in the text, ``opening`` only at its beginning. While an answer
    streams, the text from a marker on is held back.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    opening: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self.tools = {
            entry["function"]["name"]: entry["function"].get("parameters") or {} for entry in tools
        }

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the text without its calls, and the calls as entries of ``tool_calls``."""
        kept: list[str] = []
        calls: list[ToolCall] = []
        done = 0
        unreadable = 0
        start = self._find(text, 0)
        while start >= 0 and unreadable < _MOST_UNREADABLE:
            block = self.read(text, start)
            unreadable += block is None
            if block is not None:
                kept.append(text[done:start])
                done, entries = block
                calls += entries
            start = self._find(text, done if block is not None else start + 1)
        return "".join([*kept, text[done:]]), calls

    def read(self, text: str, start: int) -> tuple[int, list[ToolCall]] | None:
        """Parse the block that begins at ``start``; return its end and its calls, or None if it
        cannot be parsed.
        """
        raise NotImplementedError

    def _find(self, text: str, start: int) -> int:
        starts = [at for mark in self.marks if (at := text.find(mark, start)) >= 0]
        return min(starts, default=-1)


class NoCalls(Format):
    """A parser that finds no calls: everything is text."""


class Hermes(Format):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many
    others.
    """

    marks = ("<tool_call>",)

    def read(self, text: str, start: int) -> tuple[int, list[ToolCall]] | None:
        decoded = _json_at(text, start + len("<tool_call>"))
        if decoded is None:
            return None
        value, end = decoded
        end = _after_space(text, end)
        calls = read_calls(value)
        return (
            (end + len("</tool_call>"), calls)
            if calls and text.startswith("</tool_call>", end)
            else None
        )


class Glm(Format):
    """``<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>…</tool_call>``: GLM-4.5, 4.6
    and 4.7.
    """

    marks = ("<tool_call>",)

    def read(self, text: str, start: int) -> tuple[int, list[ToolCall]] | None:
        begin = start + len("<tool_call>")
        end = text.find("</tool_call>", start)
        body = text[begin:end]
        if end < 0 or "<tool_call>" in body:
            return None
        head, key, rest = body.partition("<arg_key>")
        name = head.replace("\\n", "\n").strip()
        if not _NAME.fullmatch(name):
            return None
        arguments: JsonObject = {}
        for part in rest.split("<arg_key>") if key else ():
            word, closed, after = part.partition("</arg_key>")
            _, opened, value = after.partition("<arg_value>")
            value, ended, _ = value.partition("</arg_value>")
            if not (closed and opened and ended):
                return None
            arguments[word.strip()] = _by_schema(
                self.tools.get(name, {}), word.strip(), value, guess=True
            )
        return end + len("</tool_call>"), [call(name, clean(arguments))]


class Qwen3Coder(Format):
    """``<tool_call><function=NAME><parameter=K>V</parameter>…</function></tool_call>``:
    Qwen3-Coder, Qwen 3.5.
    """

    marks = ("<tool_call>",)

    def read(self, text: str, start: int) -> tuple[int, list[ToolCall]] | None:
        begin = start + len("<tool_call>")
        end = text.find("</tool_call>", start)
        body = text[begin:end]
        if end < 0 or "<tool_call>" in body or "<function=" not in body:
            return None
        calls = []
        for part in body.split("<function=")[1:]:
            name, closed, rest = part.partition("</function>")[0].partition(">")
            if not closed or not _NAME.fullmatch(name.strip()):
                return None
            calls.append(call(name.strip(), clean(self._arguments(name.strip(), rest))))
        return end + len("</tool_call>"), calls

    def _arguments(self, name: str, text: str) -> JsonObject:
        schema = self.tools.get(name, {})
        arguments = JsonObject()
        for part in text.split("<parameter=")[1:]:
            key, _, value = part.partition("</parameter>")[0].partition(">")
            arguments[key.strip()] = _by_schema(
                schema, key.strip(), value.removeprefix("\n").removesuffix("\n")
            )
        return arguments


class _Sections(Format):
    """Forms in which each call is enclosed in two special tokens, and all calls in a section of two
    more.
    """

    section: ClassVar[tuple[str, str]]
    one: ClassVar[tuple[str, str]]

    def read(self, text: str, start: int) -> tuple[int, list[ToolCall]] | None:
        position = start
        calls = []
        if text.startswith(self.section[0], start):
            position = _after_space(text, start + len(self.section[0]))
        while text.startswith(self.one[0], position):
            end = text.find(self.one[1], position)
            entry = self.entry(text[position + len(self.one[0]) : end]) if end >= 0 else None
            if entry is None:
                return None
            calls.append(entry)
            position = _after_space(text, end + len(self.one[1]))
        if text.startswith(self.section[1], position):
            position += len(self.section[1])
        return (position, calls) if calls else None

    def entry(self, text: str) -> ToolCall | None:
        """Parse the text between the tokens of one call; None if it cannot be parsed."""
        raise NotImplementedError


class DeepSeek(_Sections):
    """DeepSeek V3 and R1 (``function<｜tool▁sep｜>NAME`` and a block of JSON), V3.1
    (``NAME<｜tool▁sep｜>{…}``).
    """

    marks = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    one = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")

    def entry(self, text: str) -> ToolCall | None:
        name, separator, arguments = text.partition("<｜tool▁sep｜>")
        if "```json" in arguments:
            name, _, arguments = arguments.partition("```json")
            arguments = arguments.rstrip().removesuffix("```")
        return _entry(name, arguments) if separator else None


class Kimi(_Sections):
    """Kimi K2:
    ``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>``. Its
    template renders the ids of calls, so the model's own ids are kept."""

    marks = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    one = ("<|tool_call_begin|>", "<|tool_call_end|>")
    _id = re.compile(r"(?:functions\.)?([\w.\-]+):\d+")

    def entry(self, text: str) -> ToolCall | None:
        call_id, separator, arguments = text.partition("<|tool_call_argument_begin|>")
        known = self._id.fullmatch(call_id.strip())
        entry = _entry(known[1], arguments) if separator and known else None
        return None if entry is None else {**entry, "id": call_id.strip()}


class Llama3(Format):
    """Llama 3: ``{"name": …, "parameters": {…}}``, after ``<|python_tag|>`` or as the whole answer,
    joined by ``;``.
    """

    marks = ("<|python_tag|>",)
    opening = ("{",)

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        tag = text.find("<|python_tag|>")
        start = tag if tag >= 0 else _after_space(text, 0)
        position = tag + len("<|python_tag|>") if tag >= 0 else start
        calls: list[ToolCall] = []
        end = position
        while (decoded := _json_at(text, position)) is not None:
            value, end_of_value = decoded
            read = (
                read_calls(value)
                if isinstance(value, dict) and {"parameters", "arguments"} & value.keys()
                else None
            )
            if read is None:
                break
            calls = calls + read
            end = end_of_value
            position = _after_space(text, end_of_value)
            position += text.startswith(";", position)
        return (text[:start] + text[end:].lstrip("; \n"), calls) if calls else (text, [])


class Pythonic(Format):
    """Llama 4: ``[f(a=1), g(b="x")]`` as the whole answer."""

    marks = ("<|python_start|>",)
    opening = ("[",)

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        # Long or deeply nested text is refused before ast.parse, because it can crash the
        # interpreter (see the warning in the documentation of the ast module).
        body = text.replace("<|python_start|>", "").replace("<|python_end|>", "").strip()
        if (
            not body.startswith("[")
            or not body.endswith("]")
            or len(body) > _LONGEST_LIST
            or _deep_brackets(body)
        ):
            return text, []
        try:
            tree = ast.parse(body, mode="eval").body
            calls = [_python_call(node) for node in tree.elts] if isinstance(tree, ast.List) else []
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return text, []
        return ("", calls) if calls else (text, [])


class Mistral(Format):
    """``[TOOL_CALLS] [{"name": …, "arguments": {…}}]``, or ``[TOOL_CALLS]NAME[ARGS]{…}`` of later
    models.
    """

    marks = ("[TOOL_CALLS]",)
    _compact = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\](\w+))?\[ARGS\]")

    def read(self, text: str, start: int) -> tuple[int, list[ToolCall]] | None:
        begin = start + len("[TOOL_CALLS]")
        named = self._compact.match(text, begin)
        decoded = _json_at(text, named.end() if named else begin)
        if decoded is None:
            return None
        value, end = decoded
        if named is None:
            calls = read_calls(value)
            return (end, calls) if calls else None
        if not isinstance(value, dict) or too_deep(value):
            return None
        return end, [call(named[1], clean(value), named[2] or "")]


FORMATS: dict[str, type[Format]] = {
    **dict.fromkeys(("hermes", "qwen", "qwen25"), Hermes),
    **dict.fromkeys(("glm", "glm45", "glm47"), Glm),
    **dict.fromkeys(("qwen3_coder", "step3p5"), Qwen3Coder),
    **dict.fromkeys(("deepseekv3", "deepseekv31"), DeepSeek),
    "kimi_k2": Kimi,
    "llama3": Llama3,
    "pythonic": Pythonic,
    "mistral": Mistral,
    "none": NoCalls,
}
KNOWN_MARKS = tuple(dict.fromkeys(mark for form in FORMATS.values() for mark in form.marks))


def read_calls(value: JsonValue) -> list[ToolCall] | None:
    """Parse the calls in a JSON value, which is an object or a list of objects; None if it does not
    describe calls.

    The arguments are under ``arguments`` or ``parameters``, and may be JSON text.
    """
    calls = []
    for item in value if isinstance(value, list) else [value]:
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(item, dict) or not isinstance(name, str) or too_deep(item):
            return None
        arguments = item.get("arguments", item.get("parameters"))
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments)
            except ValueError:
                return None
        if not isinstance(arguments, dict | None):
            return None
        calls.append(call(clean(name), clean(arguments or {})))
    return calls or None


def _entry(name: str, arguments: str) -> ToolCall | None:
    try:
        value = parse_json(arguments.strip() or "{}")
    except ValueError:
        return None
    return (
        call(name.strip(), value)
        if isinstance(value, dict) and _NAME.fullmatch(name.strip())
        else None
    )


def _json_at(text: str, start: int) -> tuple[JsonValue, int] | None:
    """Decode the JSON object or list at ``start``, after optional whitespace; return it with its
    end, or None.
    """
    start = _after_space(text, start)
    if not text.startswith(("{", "["), start):
        return None
    try:
        return DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _after_space(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    return space.end() if space else start


def _by_schema(schema: JsonObject, key: str, text: str, guess: bool = False) -> JsonValue:
    """Convert an argument in plain text to the type in the tool's schema.

    Args:
        guess: If the schema gives no type, parse the text as JSON where possible. Otherwise it
            stays text.
    """
    kind = _type_of(schema, key)
    if kind == "string" or (kind is None and not guess):
        return None if kind is None and text.strip() == "null" else text
    try:
        value = parse_json(text.strip())
    except ValueError:
        return _python_value(text.strip(), kind)
    if kind == "number" and isinstance(value, str):
        return text
    return value


def _python_value(text: str, kind: str | None) -> JsonValue:
    """Convert Python's ``True``, ``False`` and ``None``, which some models write, and return other
    text unchanged.
    """
    return (
        {"true": True, "false": False, "none": None}.get(text.lower(), text)
        if kind is not None
        else text
    )


def _type_of(schema: JsonObject, key: str) -> str | None:
    properties = schema.get("properties")
    field = properties.get(key) if isinstance(properties, dict) else None
    others = (field.get("anyOf") or field.get("oneOf")) if isinstance(field, dict) else None
    for option in (
        _referred(schema, part) for part in [field, *(others if isinstance(others, list) else [])]
    ):
        kinds = option.get("type") if isinstance(option, dict) else None
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if isinstance(kind, str) and kind != "null":
                return kind
    return "string" if isinstance(field, dict) and "enum" in field else None


def _referred(schema: JsonObject, part: JsonValue) -> JsonValue:
    """Return the definition that ``$ref`` of a part of ``schema`` names, as Pydantic writes the
    types of nested models; the part itself if it has no such reference."""
    path = part.get("$ref") if isinstance(part, dict) else None
    if not isinstance(path, str) or not path.startswith("#/"):
        return part
    definition: JsonValue = schema
    for name in path.removeprefix("#/").split("/"):
        definition = definition.get(name) if isinstance(definition, dict) else None
    return definition


def _deep_brackets(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth > MOST_NESTED:
            return True
    return False


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("not a call with named arguments")
    if any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("** is not an argument")
    arguments = {str(keyword.arg): _python_literal(keyword.value) for keyword in node.keywords}
    return call(node.func.id, parse_json(json.dumps(arguments)))


def _python_literal(node: ast.expr) -> JsonValue:
    words = {"true": True, "false": False, "null": None}
    return (
        words[node.id]
        if isinstance(node, ast.Name) and node.id in words
        else ast.literal_eval(node)
    )
