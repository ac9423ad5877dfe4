"""OpenAI's two APIs: translate requests of Chat Completions and Responses to the common form, and
answers back.
"""

from __future__ import annotations

import json
import time

from slime.plugins.http.server import (
    END,
    BadRequest,
    Refused,
    event,
    json_object,
    list_of,
    need,
    string,
    take,
    truth,
    whole,
)
from slime.types import JsonObject

from .demands import demand_of, openai_choice, schema_of
from .messages import Ask, Message, Reply, ToolCall, call, note, stop_strings, text_of, tool
from .trajectory import Turn

_MOST_CHOICES = 128
TOKENS = whole(1, 2**31)
OBJECTS = list_of(json_object)
CONVERSATION = list_of(json_object, least=1)
_ROLES = {"developer": "system", "function": "tool"}


def openai_error(error: Refused) -> Reply:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    kind = kinds.get(
        error.status, "invalid_request_error" if error.status < 500 else "server_error"
    )
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def _arguments(entry: ToolCall) -> str:
    return json.dumps(entry["function"]["arguments"])


class _OpenAi:
    """The parts that both of OpenAI's APIs share."""

    error = staticmethod(openai_error)

    def ping(self) -> bytes:
        """Return a comment, which keeps the connection alive and which clients skip."""
        return b": ping\n\n"


class Chat(_OpenAi):
    """``POST /v1/chat/completions``."""

    @staticmethod
    def read(body: JsonObject) -> Ask:
        """The request in the common form."""
        if body.get("logprobs"):
            note("logprobs", "are not sent to the program; they are only recorded for training")
        if body.get("functions"):
            raise BadRequest("functions is not supported: use tools")
        choices = take(body, "n", whole(1, _MOST_CHOICES), 1)
        stream = take(body, "stream", truth, False)
        if choices > 1 and stream:
            raise BadRequest("n above 1 cannot be streamed")
        tools = [
            tool(need(entry, "function", json_object, "a tool's ")) for entry in _functions(body)
        ]
        schema = schema_of(take(body, "response_format", json_object, None), "response_format")
        most_tokens = take(body, "max_tokens", TOKENS, None)
        options = take(body, "stream_options", json_object, {})
        return Ask(
            messages=[_chat_message(one) for one in need(body, "messages", CONVERSATION)],
            tools=tools,
            demand=demand_of(openai_choice(body.get("tool_choice")), schema, tools),
            max_tokens=take(body, "max_completion_tokens", TOKENS, most_tokens),
            stop=take(body, "stop", stop_strings, []),
            stream=stream,
            choices=choices,
            model=take(body, "model", string(), ""),
            usage=take(options, "include_usage", truth, False, "stream_options."),
        )

    @staticmethod
    def whole(ask: Ask, turns: list[Turn]) -> Reply:
        """The complete answer as one JSON object."""
        choices = [
            {
                "index": i,
                "message": _chat_answer(turn),
                "finish_reason": _finish(turn),
                "logprobs": None,
            }
            for i, turn in enumerate(turns)
        ]
        return {
            **_head(ask, turns[0].created, "chat.completion"),
            "choices": choices,
            "usage": _usage(turns),
        }

    def __init__(self, ask: Ask, prompt_tokens: int = 0) -> None:
        self.ask = ask
        self.head = _head(ask, int(time.time()), "chat.completion.chunk")

    def begin(self) -> bytes:
        """The first event of a stream."""
        return self._chunk({"role": "assistant", "content": ""})

    def think(self, new: str) -> bytes:
        """An event with new reasoning."""
        return self._chunk({"reasoning_content": new})

    def text(self, new: str) -> bytes:
        """An event with new text."""
        return self._chunk({"content": new})

    def end(self, turn: Turn) -> bytes:
        """The last events: tool calls, the finish reason, token counts if requested, and the end
        mark.
        """
        parts = [
            self._chunk({"tool_calls": [{"index": i, **entry}]})
            for i, entry in enumerate(_chat_calls(turn))
        ]
        parts.append(self._chunk({}, _finish(turn)))
        if self.ask.usage:
            parts.append(event({**self.head, "choices": [], "usage": _usage([turn])}))
        return b"".join([*parts, END])

    def failed(self, error: Refused) -> bytes:
        """The last event of a stream that an error ends."""
        return event(openai_error(error))

    def _chunk(self, delta: Reply, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return event({**self.head, "choices": [choice]})


def _head(ask: Ask, created: int, kind: str) -> Reply:
    return {"id": f"chatcmpl-{ask.id}", "object": kind, "created": created, "model": ask.model}


def _functions(body: JsonObject) -> list[JsonObject]:
    """Return the tools of a request that are functions.

    Other tools run on the servers of an API provider, or need an input format that is not in the
    model's prompt. They are left out.
    """
    if body.get("tool_choice") == "none":
        return []
    kept = []
    for entry in take(body, "tools", OBJECTS, []):
        if entry.get("type") in (None, "function"):
            kept.append(entry)
        else:
            note(f"tool {entry['type']}", "is left out, because only functions are supported")
    return kept


def _chat_message(raw: JsonObject) -> Message:
    role = _ROLES.get(str(raw.get("role")), raw.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"unknown role {role!r}")
    message: Message = {"role": str(role), "content": text_of(raw.get("content"))}
    calls = take(raw, "tool_calls", OBJECTS, [])
    if calls:
        message["tool_calls"] = [_chat_call(entry) for entry in calls]
    reasoning = raw.get("reasoning_content")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    if role == "tool":
        message["tool_call_id"] = str(raw.get("tool_call_id") or "")
    return message


def _chat_call(entry: JsonObject) -> ToolCall:
    function = need(entry, "function", json_object, "a tool call's ")
    return call(str(function.get("name")), function.get("arguments"), str(entry.get("id") or ""))


def _chat_answer(turn: Turn) -> Reply:
    calls = _chat_calls(turn)
    content = turn.answer["content"]
    message: Reply = {
        "role": "assistant",
        "content": (content.strip() or None) if calls else content,
        "refusal": None,
    }
    if turn.answer.get("reasoning_content"):
        message["reasoning_content"] = turn.answer["reasoning_content"]
    return {**message, "tool_calls": calls} if calls else message


def _chat_calls(turn: Turn) -> list[Reply]:
    """Return the tool calls in OpenAI's form, in which the arguments are JSON text."""
    return [
        {**entry, "function": {**entry["function"], "arguments": _arguments(entry)}}
        for entry in turn.answer.get("tool_calls", [])
    ]


def _finish(turn: Turn) -> str:
    return "length" if turn.cut else "tool_calls" if turn.answer.get("tool_calls") else "stop"


def _usage(turns: list[Turn]) -> Reply:
    prompt = turns[0].prompt_tokens
    output = sum(len(turn.output_ids) for turn in turns)
    details = {"prompt_tokens_details": {"cached_tokens": turns[0].cached_tokens}}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        **details,
    }


class Responses(_OpenAi):
    """``POST /v1/responses``."""

    @staticmethod
    def read(body: JsonObject) -> Ask:
        """The request in the common form."""
        if body.get("background") or body.get("conversation"):
            raise BadRequest(
                "background and conversation are not supported: use previous_response_id"
            )
        if isinstance(body.get("input"), str):
            messages: list[Message] = [{"role": "user", "content": str(body["input"])}]
        else:
            messages = _from_items(need(body, "input", CONVERSATION))
        instructions = text_of(body.get("instructions"), "instructions")
        if instructions:
            messages.insert(0, {"role": "system", "content": instructions})
        after = take(body, "previous_response_id", string(), "")
        tools = [tool(entry) for entry in _functions(body)]
        form = take(take(body, "text", json_object, {}), "format", json_object, None, "text.")
        return Ask(
            messages=messages,
            tools=tools,
            demand=demand_of(
                openai_choice(body.get("tool_choice")), schema_of(form, "text.format"), tools
            ),
            max_tokens=take(body, "max_output_tokens", TOKENS, None),
            stream=take(body, "stream", truth, False),
            after=after.removeprefix("resp_") or None,
            model=take(body, "model", string(), ""),
            reasoning=body.get("reasoning") is not None,
        )

    @staticmethod
    def whole(ask: Ask, turns: list[Turn]) -> Reply:
        """The complete answer as one JSON object."""
        turn = turns[0]
        prompt = turn.prompt_tokens
        output = len(turn.output_ids)
        cached = {"cached_tokens": turn.cached_tokens}
        details = {"input_tokens_details": cached, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            **_response(ask, turn.created, _status(turn)),
            "incomplete_details": {"reason": "max_output_tokens"} if turn.cut else None,
            "output": _items(turn, ask.reasoning),
            "usage": {
                "input_tokens": prompt,
                "output_tokens": output,
                "total_tokens": prompt + output,
                **details,
            },
        }

    def __init__(self, ask: Ask, prompt_tokens: int = 0) -> None:
        self.ask = ask
        self.number = 0  # of the next event
        self.thought: list[str] = []
        self.said: list[str] = []
        self.items: list[Reply] = []  # those that are complete

    def begin(self) -> bytes:
        """The first event of a stream."""
        return self._event(
            "response.created", response=_response(self.ask, int(time.time()), "in_progress")
        )

    def think(self, new: str) -> bytes:
        """Return events with new reasoning; the first ones also open an item."""
        opened = b""
        if not self.thought:
            item = {**_reasoning_item(self.ask.id, ""), "content": [], "status": "in_progress"}
            opened = self._added(item)
        self.thought.append(new)
        return opened + self._event("response.reasoning_text.delta", **self._place("rs"), delta=new)

    def _thought(self) -> bytes:
        """Return the events that complete the reasoning; nothing if there is none."""
        if not self.thought or self.items:
            return b""
        text = "".join(self.thought)
        done = self._event("response.reasoning_text.done", **self._place("rs"), text=text)
        return done + self._completed(_reasoning_item(self.ask.id, text))

    def text(self, new: str) -> bytes:
        """Return events with new text; the first ones also complete the reasoning and open the
        message.
        """
        opened = b""
        if not self.said:
            opened = self._thought() + self._added(_message_item(self.ask.id, "in_progress", []))
            opened += self._event(
                "response.content_part.added", **self._place("msg"), part=_part("")
            )
        self.said.append(new)
        return opened + self._event(
            "response.output_text.delta", **self._place("msg"), delta=new, logprobs=[]
        )

    def end(self, turn: Turn) -> bytes:
        """Return the last events: the end of the message, the tool calls, and the complete
        answer.
        """
        events = [self._thought()]
        # The complete answer must contain the text that was streamed, also where that of the turn
        # differs.
        if text := "".join(self.said):
            place = self._place("msg")
            events += [
                self._event("response.output_text.done", **place, text=text, logprobs=[]),
                self._event("response.content_part.done", **place, part=_part(text)),
                self._completed(_message_item(turn.id, _status(turn), [_part(text)])),
            ]
        for item in _items(turn, reasoning=False):
            if item["type"] == "function_call":
                place = {"item_id": item["id"], "output_index": len(self.items)}
                kind = "response.function_call_arguments"
                arguments = item["arguments"]
                events += [
                    self._added({**item, "arguments": "", "status": "in_progress"}),
                    self._event(f"{kind}.delta", **place, delta=arguments),
                    self._event(f"{kind}.done", **place, arguments=arguments, name=item["name"]),
                    self._completed(item),
                ]
            elif not text:
                self.items.append(item)
        response = {**self.whole(self.ask, [turn]), "output": self.items}
        return b"".join([*events, self._event(f"response.{_status(turn)}", response=response)])

    def _place(self, prefix: str) -> Reply:
        item = f"{prefix}_{self.ask.id}"
        return {"item_id": item, "output_index": len(self.items), "content_index": 0}

    def _added(self, item: Reply) -> bytes:
        return self._event("response.output_item.added", output_index=len(self.items), item=item)

    def _completed(self, item: Reply) -> bytes:
        self.items.append(item)
        return self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def failed(self, error: Refused) -> bytes:
        """The last event of a stream that an error ends."""
        return self._event("error", code=error.code, message=str(error), param=None)

    def _event(self, kind: str, **fields: object) -> bytes:
        self.number += 1
        return event({"type": kind, "sequence_number": self.number - 1, **fields}, kind)


def _response(ask: Ask, created: int, status: str) -> Reply:
    return {
        "id": f"resp_{ask.id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "model": ask.model,
        "output": [],
        "tools": [{"type": "function", "strict": None, **entry["function"]} for entry in ask.tools],
        "tool_choice": "required" if ask.demand is not None and ask.demand.calls else "auto",
        "parallel_tool_calls": True,
        "metadata": {},
        **dict.fromkeys(("error", "incomplete_details", "instructions", "top_p", "temperature")),
    }


def _part(text: str) -> Reply:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(turn: Turn) -> str:
    return "incomplete" if turn.cut else "completed"


def _message_item(turn_id: str, status: str, content: list[Reply]) -> Reply:
    item: Reply = {"id": f"msg_{turn_id}", "type": "message", "status": status}
    return {**item, "role": "assistant", "content": content}


def _reasoning_item(turn_id: str, text: str) -> Reply:
    content = [{"type": "reasoning_text", "text": text}]
    return {
        "id": f"rs_{turn_id}",
        "type": "reasoning",
        "summary": [],
        "content": content,
        "status": "completed",
    }


def _items(turn: Turn, reasoning: bool) -> list[Reply]:
    calls = turn.answer.get("tool_calls", [])
    text = turn.answer["content"]
    thought = turn.answer.get("reasoning_content")
    items = [_reasoning_item(turn.id, thought)] if thought and reasoning else []
    if text.strip() or not calls:
        items.append(_message_item(turn.id, _status(turn), [_part(text)]))
    for entry in calls:
        head = {
            "id": f"fc_{entry['id']}",
            "type": "function_call",
            "status": "completed",
            "call_id": entry["id"],
        }
        items.append({**head, "name": entry["function"]["name"], "arguments": _arguments(entry)})
    return items


def _from_items(items: list[JsonObject]) -> list[Message]:
    """Convert input items to messages. Consecutive text and calls of the assistant become one
    message.
    """
    messages: list[Message] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "reasoning":
            continue
        if kind == "function_call_output":
            output = text_of(item.get("output"))
            messages.append(
                {"role": "tool", "content": output, "tool_call_id": str(item.get("call_id") or "")}
            )
        elif kind == "function_call":
            entry = call(
                str(item.get("name")), item.get("arguments"), str(item.get("call_id") or "")
            )
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(entry)
        elif kind == "message":
            messages.append(_chat_message(item))
        else:
            raise BadRequest(f"input items of type {kind!r} are not supported")
    return messages
