"""Anthropic's Messages API: translate its requests to the common form, and answers back."""

from __future__ import annotations

import json

from slime.plugins.http.server import (
    BadRequest,
    Refused,
    event,
    json_object,
    need,
    string,
    take,
    truth,
)
from slime.types import JsonObject, JsonValue

from .demands import anthropic_choice, demand_of, schema_of
from .messages import (
    Ask,
    Message,
    Reply,
    Tool,
    call,
    fold_system,
    note,
    stop_strings,
    text_of,
    tool,
)
from .openai_api import CONVERSATION, OBJECTS, TOKENS
from .trajectory import Turn

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "overloaded_error",
}


def anthropic_error(error: Refused) -> Reply:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


class Messages:
    """``POST /v1/messages``."""

    error = staticmethod(anthropic_error)

    @staticmethod
    def read(body: JsonObject) -> Ask:
        """The request in the common form."""
        messages: list[Message] = []
        if body.get("system"):
            messages.append({"role": "system", "content": text_of(body["system"], "system")})
        for raw in need(body, "messages", CONVERSATION):
            messages += _messages(raw)
        choice = take(body, "tool_choice", json_object, {})
        tools = [] if choice.get("type") == "none" else _tools(body)
        config = take(body, "output_config", json_object, {})
        form = take(config, "format", json_object, None, "output_config.")
        # The beta version of the API has the format in a separate field.
        form = take(body, "output_format", json_object, form)
        thinking = take(body, "thinking", json_object, {})
        return Ask(
            messages=fold_system(messages),
            tools=tools,
            demand=demand_of(anthropic_choice(choice), schema_of(form, "output_config.format"), tools),
            max_tokens=take(body, "max_tokens", TOKENS, None),
            stop=take(body, "stop_sequences", stop_strings, []),
            stream=take(body, "stream", truth, False),
            model=take(body, "model", string(), ""),
            reasoning=thinking.get("type") in ("enabled", "adaptive"),
        )  # fmt: skip

    @staticmethod
    def whole(ask: Ask, turns: list[Turn]) -> Reply:
        """The complete answer as one JSON object."""
        turn = turns[0]
        return {
            **_head(ask),
            "content": _blocks(turn, ask.reasoning),
            **_reason(ask, turn),
            "usage": _usage(turn),
        }

    def __init__(self, ask: Ask, prompt_tokens: int = 0) -> None:
        self.ask = ask
        self.prompt_tokens = prompt_tokens
        self.open: str | None = None  # type of the open content block
        self.index = -1  # index of the open content block

    def begin(self) -> bytes:
        """Return the first event of a stream. The number of cached tokens is known only at the
        end.
        """
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        head = {**_head(self.ask), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**head, "usage": usage})

    def ping(self) -> bytes:
        """Return an event that keeps the connection alive."""
        return _event("ping")

    def think(self, new: str) -> bytes:
        """Return events with new reasoning; the first ones also open a block."""
        opened = self._block({"type": "thinking", "thinking": "", "signature": ""})
        return opened + self._delta({"type": "thinking_delta", "thinking": new})

    def text(self, new: str) -> bytes:
        """Return events with new text; the first ones also open a block."""
        return self._block({"type": "text", "text": ""}) + self._delta(
            {"type": "text_delta", "text": new}
        )

    def end(self, turn: Turn) -> bytes:
        """Return the last events: tool calls, the stop reason and the token counts."""
        parts = []
        for block in _blocks(turn, reasoning=False):
            if block["type"] == "tool_use":
                parts.append(self._close() + self._block({**block, "input": {}}))
                parts.append(
                    self._delta(
                        {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                    )
                )
            else:  # for an empty answer, which had no text to open the block
                parts.append(self._block({"type": "text", "text": ""}))
        parts.append(self._close())
        parts.append(_event("message_delta", delta=_reason(self.ask, turn), usage=_usage(turn)))
        return b"".join([*parts, _event("message_stop")])

    def _block(self, block: Reply) -> bytes:
        """Return the events that open a block of another type, after closing the open one; nothing
        if it is open.
        """
        if self.open == block["type"]:
            return b""
        closed = self._close()
        self.open = str(block["type"])
        self.index = self.index + 1
        return closed + _event("content_block_start", index=self.index, content_block=block)

    def _delta(self, delta: Reply) -> bytes:
        return _event("content_block_delta", index=self.index, delta=delta)

    def _close(self) -> bytes:
        if self.open is None:
            return b""
        # Clients send thinking blocks back with their signature; any text will do, since it is
        # never verified.
        signed = (
            self._delta({"type": "signature_delta", "signature": self.ask.id})
            if self.open == "thinking"
            else b""
        )
        self.open = None
        return signed + _event("content_block_stop", index=self.index)

    def failed(self, error: Refused) -> bytes:
        """The last event of a stream that an error ends."""
        return event(anthropic_error(error), "error")


def _event(kind: str, **fields: object) -> bytes:
    return event({"type": kind, **fields}, kind)


def _head(ask: Ask) -> Reply:
    return {"id": f"msg_{ask.id}", "type": "message", "role": "assistant", "model": ask.model}


def _reason(ask: Ask, turn: Turn) -> Reply:
    matched = turn.outputs[-1]["meta_info"]["finish_reason"].get("matched")
    if turn.cut:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if turn.answer.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(matched, str) and matched in ask.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(turn: Turn) -> Reply:
    cached = turn.cached_tokens
    counts = {"input_tokens": turn.prompt_tokens - cached, "output_tokens": len(turn.output_ids)}
    return {**counts, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


def _blocks(turn: Turn, reasoning: bool) -> list[Reply]:
    calls = turn.answer.get("tool_calls", [])
    text = turn.answer["content"]
    thought = turn.answer.get("reasoning_content")
    blocks: list[Reply] = []
    if thought and reasoning:
        blocks.append({"type": "thinking", "thinking": thought, "signature": turn.id})
    if text.strip() or not calls:
        blocks.append({"type": "text", "text": text})
    for entry in calls:
        function = entry["function"]
        blocks.append(
            {
                "type": "tool_use",
                "id": entry["id"],
                "name": function["name"],
                "input": function["arguments"],
            }
        )
    return blocks


def _tools(body: JsonObject) -> list[Tool]:
    """Return the client's own tools. Tools of Anthropic's servers, and tools that its models know
    without a schema, are left out."""
    tools = []
    for entry in take(body, "tools", OBJECTS, []):
        if entry.get("type") in (None, "custom"):
            tools.append(tool(entry, "input_schema"))
        else:
            note(
                f"tool {entry['type']}",
                "is left out, because only tools with an input_schema are supported",
            )
    return tools


def _messages(raw: JsonObject) -> list[Message]:
    """Convert a message with content blocks to common messages. Each tool result becomes a separate
    message before the others."""
    role = raw.get("role")
    content = raw.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"unknown role {role!r}")
    # A text is the short form of one text block.
    text: JsonObject = {"type": "text", "text": content}
    blocks = [text] if isinstance(content, str) else need(raw, "content", OBJECTS)
    message: Message = {"role": str(role), "content": ""}
    results: list[Message] = []
    texts: list[JsonValue] = []
    for block in blocks:
        match block.get("type"):
            case "tool_result":
                result = text_of(block.get("content"))
                call_id = str(block.get("tool_use_id") or "")
                results.append({"role": "tool", "content": result, "tool_call_id": call_id})
            # The calls of the model in an earlier turn, as the client sends them back.
            case "tool_use":
                used = call(str(block.get("name")), block.get("input"), str(block.get("id") or ""))
                message.setdefault("tool_calls", []).append(used)
            # Reasoning is kept apart: it is not compared, since clients may leave it out.
            case "thinking" if role == "assistant":
                before = message.get("reasoning_content", "")
                message["reasoning_content"] = before + str(block.get("thinking") or "")
            case "thinking" | "redacted_thinking":
                pass
            # What is left is text; media become placeholders.
            case _:
                texts.append(block)
    message["content"] = text_of(texts)
    is_empty = not texts and "tool_calls" not in message
    return results if results and is_empty else [*results, message]
