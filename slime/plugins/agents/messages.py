"""The common form of conversations, to which requests of the three APIs are translated, and which
chat templates accept.

Every value is checked before it is used. A mistake of a client leads to a response with status 400,
never to an error of the run."""

from __future__ import annotations

import json
import logging
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

from slime.data.plain_values import parse_json
from slime.plugins.http.server import (
    BadRequest,
    json_object,
    need,
    one_or_list,
    refuse,
    string,
    take,
)
from slime.types import JsonObject, JsonValue

if TYPE_CHECKING:
    from .demands import Demand


logger = logging.getLogger(__name__)
Reply = dict[str, object]
"""A JSON object that is sent to a client or to an engine. Objects that clients send are of type
``JsonObject``.
"""
_noted: set[str] = set()


def note(name: str, words: str) -> None:
    """Log once per process that slime does not treat a value of a request as the client may
    expect.
    """
    if name not in _noted:
        _noted.add(name)
        logger.warning("request of an agent program: %r %s (this is logged only once)", name, words)


def stop_strings(value: object, name: str) -> list[str]:
    """Check a string or a list of strings, of which empty ones are left out."""
    return [stop for stop in one_or_list(string())(value, name) if stop]


# --- the common form of conversations ---


class CalledFunction(TypedDict):
    """The function of a tool call. ``arguments`` is an object here, but a JSON string in OpenAI's
    API.
    """

    name: str
    arguments: JsonObject


class ToolCall(TypedDict):
    """A tool call of the model. ``id`` is empty until one is assigned."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(TypedDict):
    """A message of a conversation.

    ``role`` is system, user, assistant or tool. Only messages of the assistant have ``tool_calls``
    and ``reasoning_content``; the latter is ignored when conversations are compared. Messages of
    tools have ``tool_call_id``.
    """

    role: str
    content: str
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]


class ToolFunction(TypedDict):
    """The signature of a tool. ``parameters`` is a JSON schema."""

    name: str
    description: str
    parameters: JsonObject


class Tool(TypedDict):
    """A tool that the model may call, in OpenAI's form."""

    type: Literal["function"]
    function: ToolFunction


_OF_A_TOOL = "a tool's "
RAW_ARGUMENTS = "_raw_arguments"
"""The key under which arguments that are not a JSON object are stored as text."""
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("input_audio", "audio"), "audio"),
    **dict.fromkeys(("file", "input_file"), "file"),
    "document": "document",
    **dict.fromkeys(("video", "video_url"), "video"),
}


@dataclass
class Ask:
    """One request of a client in the common form.

    Attributes:
        max_tokens: The client's limit for the answer in tokens; None for the limit of the run.
        stop: Stop strings.
        stream: Whether the answer is sent while it is generated.
        choices: Number of answers to generate.
        after: Id of the answer that ``messages`` continue (``previous_response_id`` of the
            Responses API).
        model: The model name, which is repeated in the answer.
        usage: Whether a stream ends with the token counts.
        reasoning: Whether the client accepts the model's reasoning in a separate field.
        demand: The client's requirements for the answer; None if there are none.
        id: Id of the answer if there is only one.
    """

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    stream: bool = False
    choices: int = 1
    after: str | None = None
    model: str = ""
    usage: bool = False
    reasoning: bool = True
    demand: Demand | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


def call(name: str, arguments: JsonValue, call_id: str = "") -> ToolCall:
    """Create an entry of ``tool_calls``. The arguments may be JSON text, as OpenAI's clients send
    them.

    Arguments that are not a JSON object are stored under :data:`RAW_ARGUMENTS` and not rejected,
    because the model may have written them in an earlier turn.
    """
    if isinstance(arguments, str):
        try:
            parsed = parse_json(arguments or "{}")
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else {RAW_ARGUMENTS: arguments}
    elif not isinstance(arguments, dict):
        arguments = {} if arguments is None else {RAW_ARGUMENTS: json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(entry: JsonObject, schema: str = "parameters") -> Tool:
    """Create a tool from the object that a client sent.

    Args:
        schema: The field with the JSON schema of its arguments.
    """
    empty: JsonObject = {"type": "object", "properties": {}}
    function: ToolFunction = {
        "name": need(entry, "name", string(), _OF_A_TOOL),
        "description": take(entry, "description", string(), "", _OF_A_TOOL),
        "parameters": take(entry, schema, json_object, empty, _OF_A_TOOL) or empty,
    }
    return {"type": "function", "function": function}


def text_of(content: JsonValue, name: str = "content") -> str:
    """Return the text of ``content``, which is a string, None, or a list of parts in the form of
    any of the APIs.

    Images, audio and files are replaced by a placeholder, because agents are trained on text only.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refuse(name, "must be a string or a list of parts", content)
    return "".join(map(_part_text, content))


def _part_text(part: JsonValue) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise refuse("content parts", "must be objects", part)
    kind = part.get("type")
    source = part.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        part = {"text": source.get("data")}
    text = part.get("text", part.get("refusal"))
    if isinstance(text, str):
        return text
    if not isinstance(kind, str) or kind not in _MEDIA:
        raise BadRequest(f"content parts of type {kind!r} are not supported, only text"[:200])
    note(kind, "is replaced by a placeholder, because conversations are text only")
    return f"[{_MEDIA[kind]} omitted]"


def fold_system(messages: list[Message]) -> list[Message]:
    """Return the conversation with at most one system message, at its beginning: many chat
    templates accept no other.

    System messages at the beginning are joined. A later one is joined to an adjacent user message,
    preferably the one before it. If there is none, it becomes a user message.
    """
    folded: list[Message] = []
    note: list[str] = []  # texts of system messages that may be joined to the next message

    def settle() -> None:
        if note:
            folded.append({"role": "user", "content": "\n\n".join(note)})
            note.clear()

    for message in messages:
        role = message["role"]
        content = message["content"]
        before = folded[-1]["role"] if folded and not note else None
        if role == "system" and (before in ("system", "user")):
            folded[-1] = {**folded[-1], "content": f"{folded[-1]['content']}\n\n{content}"}
        elif role == "system" and (folded or note):
            note.append(content)
        elif role == "user" and note:
            folded.append({"role": "user", "content": "\n\n".join([*note, content])})
            note.clear()
        else:
            settle()
            folded.append(message)
    settle()
    return folded


def key_of(message: Message) -> tuple[str, str, str]:
    """Return a key by which two messages are compared. Clients store messages differently, so the
    key leaves out ids of calls, reasoning, whitespace around the text, and whether a whole number
    is written as ``1.0``, which programs in JavaScript send back as ``1``."""
    calls = [
        (c["function"]["name"], _numbers(c["function"]["arguments"]))
        for c in message.get("tool_calls") or []
    ]
    return message["role"], message["content"].strip(), json.dumps(calls, sort_keys=True)


def _numbers(value: JsonValue) -> JsonValue:
    """Return a JSON value with its whole numbers as integers."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
