"""What the three APIs share: checks of request fields, errors, events, and the common form of
conversations.

Every value is checked before it is used. A mistake of a client leads to a response with status 400,
never to an error of the run. Requests of all APIs are translated to the common form, which chat
templates accept."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, NotRequired, TypedDict, TypeVar

import orjson

from slime.data.plain_values import parse_json
from slime.types import JsonObject, JsonValue

if TYPE_CHECKING:
    from .demands import Demand


logger = logging.getLogger(__name__)
T = TypeVar("T")
Reply = dict[str, object]
"""A JSON object that is sent to a client or to an engine. Objects that clients send are of type
``JsonObject``.
"""
_noted: set[str] = set()


class ApiError(Exception):
    """An error that is sent to the client in the form of its API.

    Args:
        status: HTTP status. Client libraries do not retry statuses below 500 except 408, 409 and
            429.
        code: Machine-readable code in OpenAI's form.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


class Kind(NamedTuple):
    """The JSON types that a field may have."""

    types: tuple[type, ...]
    words: str


TEXT = Kind((str,), "a string")
FLAG = Kind((bool,), "true or false")
OBJECT = Kind((dict,), "an object")
LIST = Kind((list,), "a list")
CONTENT = Kind((str, list), "a string or a list of parts")
COMMON_FIELDS = {"stream": FLAG, "model": TEXT}
"""The fields of all three APIs that nothing else checks."""


def check_fields(body: Mapping[str, object], table: Mapping[str, Kind], where: str = "") -> None:
    """Raise an :class:`ApiError` for the first field whose type differs from the table. null counts
    as absent.
    """
    for name, kind in table.items():
        value = body.get(name)
        if value is not None and not isinstance(value, kind.types):
            raise ApiError(400, f"{where}{name} must be {kind.words}, got {_shown(value)}")


def guarded(read: Callable[[JsonObject], T], body: JsonObject) -> T:
    """Call ``read(body)``, and treat any error about the shape of the body as a mistake of the
    client.

    Raises:
        ApiError: With status 400.
    """
    try:
        return read(body)
    except (TypeError, AttributeError, LookupError, ValueError, RecursionError) as error:
        logger.debug("a request could not be parsed", exc_info=True)
        raise ApiError(
            400, f"the request could not be parsed: {type(error).__name__}: {error}"[:500]
        ) from error


def to_json(content: object) -> bytes:
    """Encode an object as JSON in UTF-8. orjson is faster, but rejects integers above 64 bits,
    which models can write."""
    try:
        return orjson.dumps(content)
    except TypeError:
        return json.dumps(content).encode()


def event(data: Reply, name: str | None = None) -> bytes:
    """Encode one server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + to_json(data) + b"\n\n"


def whole_number(body: JsonObject, *names: str) -> int | None:
    """Return the first of these fields that is present. It must be a whole number above 0; ``10.0``
    counts as 10.
    """
    for name in names:
        value = body.get(name)
        if value is not None:
            number = int(value) if isinstance(value, float) and value.is_integer() else value
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ApiError(400, f"{name} must be a whole number above 0, got {_shown(value)}")
            return number
    return None


def strings(body: JsonObject, name: str) -> list[str]:
    """Return a field that is a string or a list of strings as a list without empty strings."""
    value = body.get(name) or []
    items = [value] if isinstance(value, str) else value
    texts = [item for item in items if isinstance(item, str)] if isinstance(items, list) else None
    if texts is None or not isinstance(items, list) or len(texts) < len(items):
        raise ApiError(400, f"{name} must be a string or a list of strings, got {_shown(value)}")
    return [item for item in texts if item]


def inner_object(body: JsonObject, name: str, where: str = "") -> JsonObject | None:
    """Return a field that is an object; None if it is absent or null.

    Args:
        where: Prefix of the field's name in error messages.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise ApiError(400, f"{where}{name} must be {OBJECT.words}, got {_shown(value)}")
    return value


def objects(body: JsonObject, name: str, required: bool = True) -> list[JsonObject]:
    """Return a field that must be a list of objects, with at least one if ``required``."""
    value = body.get(name)
    if value is None and not required:
        return []
    entries = (
        [item for item in value if isinstance(item, dict)] if isinstance(value, list) else None
    )
    if (
        entries is None
        or not isinstance(value, list)
        or len(entries) < len(value)
        or (required and not entries)
    ):
        raise ApiError(
            400, f"{name} must be a list of objects" + (", at least one" if required else "")
        )
    return entries


def note(name: str, words: str) -> None:
    """Log once per process that slime does not treat a value of a request as the client may
    expect.
    """
    if name not in _noted:
        _noted.add(name)
        logger.warning("request of an agent program: %r %s (this is logged only once)", name, words)


def _shown(value: object) -> str:
    return repr(value)[:100]


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


def tool(name: JsonValue, description: JsonValue, parameters: JsonValue) -> Tool:
    """Create a tool from the values that a client sent."""
    fields = {"name": name, "description": description, "parameters": parameters}
    check_fields(fields, {"name": TEXT, "description": TEXT, "parameters": OBJECT}, "a tool's ")
    if not name:
        raise ApiError(400, "a function tool must have a name")
    schema = parameters if isinstance(parameters, dict) else {}
    function: ToolFunction = {
        "name": str(name),
        "description": str(description or ""),
        "parameters": schema or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def text_of(content: JsonValue) -> str:
    """Return the text of ``content``, which is a string, None, or a list of parts in the form of
    any of the APIs.

    Images, audio and files are replaced by a placeholder, because agents are trained on text only.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(400, f"content must be {CONTENT.words}, got {content!r}"[:200])
    return "".join(map(_part_text, content))


def _part_text(part: JsonValue) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ApiError(400, f"content parts must be objects, got {part!r}"[:200])
    kind = part.get("type")
    source = part.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        part = {"text": source.get("data")}
    text = part.get("text", part.get("refusal"))
    if isinstance(text, str):
        return text
    if not isinstance(kind, str) or kind not in _MEDIA:
        raise ApiError(400, f"content parts of type {kind!r} are not supported, only text"[:200])
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
