"""The common form of conversations: what all endpoints are translated to, and what chat templates take."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""``role`` (system, user, assistant, tool) and ``content``, a string. An assistant's may have ``tool_calls``
(``{"id", "type": "function", "function": {"name", "arguments": dict}}``), a tool's has ``tool_call_id``."""
Tool = dict[str, Any]
"""OpenAI's form: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""


class ApiError(Exception):
    """Answered to the client in the form of its API.

    Args:
        status: of HTTP; below 500 (without 408, 409, 429) client libraries do not try again.
        code: OpenAI's machine-readable code.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass
class Ask:
    """One request: answer this conversation.

    Attributes:
        max_tokens: of the answer, as the client wants it; None leaves it to the run.
        stop: stop strings.
        choices: answers to give.
        after: id of the answer that ``messages`` go on from (Responses' ``previous_response_id``).
        model: name to repeat in the answer.
        usage: whether a stream ends with the token counts.
        id: of the answer, where there is only one.
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
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


def call(name: str, arguments: Any, call_id: str = "") -> dict[str, Any]:
    """An entry of ``tool_calls``; arguments may be JSON text, as OpenAI's clients send them."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise ApiError(400, f"the arguments of the call of {name!r} are not JSON: {arguments[:200]}") from None
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: Any, description: Any, parameters: Any) -> Tool:
    """A function that the model may call."""
    if not isinstance(name, str) or not name:
        raise ApiError(400, "only function tools with a name are supported")
    parameters = parameters or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": name, "description": description or "", "parameters": parameters},
    }


def text_of(content: Any) -> str:
    """The text of a ``content``: a string, None, or a list of text parts in any of the APIs' forms."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(400, f"content must be a string or a list of parts, not {type(content).__name__}")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise ApiError(400, f"content parts of type {part.get('type')!r} are not supported: text only")
        texts.append(text)
    return "".join(texts)


def key_of(message: Message) -> tuple[Any, ...]:
    """What two messages that mean the same have in common, however a client stored the first one: ids of calls are
    left out, and space around the text."""
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    return message["role"], message["content"].strip(), json.dumps(calls, sort_keys=True)


def whole_number(body: dict[str, Any], *names: str) -> int | None:
    """The first of these fields that is given, a number above 0."""
    for name in names:
        value = body.get(name)
        if value is not None:
            if not isinstance(value, int) or value < 1:
                raise ApiError(400, f"{name} must be a whole number above 0, got {value!r}")
            return value
    return None


def objects(body: dict[str, Any], name: str, required: bool = True) -> list[dict[str, Any]]:
    """A field that must be a list of objects."""
    value = body.get(name)
    if value is None and not required:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value) or (required and not value):
        raise ApiError(400, f"{name} must be a list of objects" + (", at least one" if required else ""))
    return value
