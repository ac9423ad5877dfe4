"""The HTTP endpoint of agents: OpenAI's Chat Completions and Responses APIs, and Anthropic's
Messages API.

A request identifies its session by the path, ``/s/SESSION/v1/…``, or by its API key. One server per
event loop serves the sessions of all samples.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from aiohttp import web

from slime.data.plain_values import too_deep
from slime.data.sample import Sample
from slime.plugins.http.server import (
    MOST_BYTES,
    SERVING,
    BadRequest,
    Refused,
    body_of,
    errors_as_json,
    event_stream,
    json_answer,
    listen,
    request_guard,
)
from slime.types import JsonObject, SamplingParams

from .anthropic_api import Messages
from .messages import Ask, note
from .openai_api import Chat, Responses
from .session import Place, Session
from .trajectory import Turn

if TYPE_CHECKING:
    from slime.rollout.state import GenerateState

logger = logging.getLogger(__name__)
Dialect = type[Chat] | type[Responses] | type[Messages]
DIALECTS: dict[str, Dialect] = {
    "chat/completions": Chat,
    "responses": Responses,
    "messages": Messages,
}
# a ping is sent after so many seconds without a token: clients and proxies close silent streams
PING_SECONDS = 15.0
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
             "frequency_penalty", "logit_bias")  # fmt: skip
_IGNORED = {
    **dict.fromkeys(
        _SAMPLING, "is ignored: the flags of the run determine the sampling parameters"
    ),
    "chat_template_kwargs": "is ignored: --apply-chat-template-kwargs determines it",
}
_servers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[AgentServer]] = (
    weakref.WeakKeyDictionary()
)


class AgentServer:
    """The HTTP server of all sessions.

    Args:
        dialects: The APIs that it speaks, by the path after ``/v1/``.
    """

    def __init__(self, host: str, dialects: Mapping[str, Dialect] = DIALECTS) -> None:
        self.host = host
        self.port = 0
        self.sessions: dict[str, Session] = {}
        self.app = app = web.Application(
            middlewares=[errors_as_json(), request_guard(host)], client_max_size=MOST_BYTES
        )
        routes: list[web.RouteDef] = []
        for prefix in ("", "/s/{session}"):
            for path, dialect in dialects.items():
                routes.append(web.post(f"{prefix}/v1/{path}", self._handler(dialect, self._answer)))
            if Messages in dialects.values():
                routes.append(
                    web.post(
                        f"{prefix}/v1/messages/count_tokens", self._handler(Messages, self._count)
                    )
                )
            routes.append(web.get(f"{prefix}/v1/models", self._handler(Chat, self._models)))
        app.add_routes(routes)
        self._runner = web.AppRunner(app, **SERVING)

    async def start(self) -> AgentServer:
        """Listen on a free port of the host."""
        self.port = await listen(self._runner, self.host)
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    def url(self, session: Session) -> str:
        """Return the base URL of a session, without ``/v1``."""
        return f"http://{self.host}:{self.port}/s/{session.id}"

    def open(
        self, state: GenerateState, sample: Sample, params: SamplingParams, evaluation: bool = False
    ) -> Session:
        """Create a session; :meth:`close` ends it."""
        session = Session(uuid.uuid4().hex, state, sample, params, evaluation)
        self.sessions[session.id] = session
        return session

    def close(self, session: Session) -> None:
        session.close()
        self.sessions.pop(session.id, None)

    def _handler(
        self,
        dialect: Dialect,
        answer: Callable[[web.Request, Dialect, Session], Awaitable[web.StreamResponse]],
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            session: Session | None = None
            task = asyncio.current_task()
            assert task is not None
            try:
                session = self._session(request)
                session.tasks.add(task)
                return await answer(request, dialect, session)
            # A mistake of the client, or a session that has ended: an answer in the form of its
            # API.
            except Refused as error:
                return _refusal(dialect, error)
            except ConnectionError:  # the client has disconnected, so nobody reads this response
                return web.Response()
            except Exception as error:
                # For an engine's error, Session.answer has already set session.fault, and broken()
                # does nothing.
                if session is not None:
                    session.broken(error)
                logger.exception("a request of an agent program failed")
                return _refusal(dialect, Refused(f"{type(error).__name__}: {error}", 500))
            finally:
                if session is not None:
                    session.tasks.discard(task)

        return handle

    def _session(self, request: web.Request) -> Session:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        name = request.match_info.get("session") or request.headers.get("x-api-key") or bearer
        return self.session_named(name)

    def session_named(self, name: str) -> Session:
        """Return an open session; raise a :class:`Refused` if there is none with this id."""
        session = self.sessions.get(name)
        if session is None:
            raise Refused(
                "unknown session: it has ended, or the URL or API key is wrong",
                401,
                "invalid_api_key",
            )
        return session

    async def _answer(
        self, request: web.Request, dialect: Dialect, session: Session
    ) -> web.StreamResponse:
        ask = dialect.read(await _body(request))
        prepared = session.prepare(ask)
        if ask.stream:
            parent, _, added = prepared
            encoder = dialect(ask, (parent.length if parent else 0) + len(added))
            return await _stream(request, encoder, session, ask, prepared)
        answers = [asyncio.ensure_future(session.answer(ask, prepared)) for _ in range(ask.choices)]
        try:
            # An error is raised after all have ended, so that none of them goes on alone.
            await asyncio.gather(*answers, return_exceptions=True)
            response = json_answer(dialect.whole(ask, [answer.result() for answer in answers]))
            # The response is sent here and not by aiohttp, to notice if the client does not receive
            # it: such turns are not part of the conversation and are removed from the tree.
            await response.prepare(request)
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            # those still being generated were cancelled
            done = await asyncio.gather(*answers, return_exceptions=True)
            _undelivered(session, [turn for turn in done if isinstance(turn, Turn)])
            raise
        return response

    async def _count(
        self, request: web.Request, dialect: Dialect, session: Session
    ) -> web.StreamResponse:
        ask = dialect.read(await _body(request))
        return json_answer({"input_tokens": len(session.template.prompt(ask.messages, ask.tools))})

    async def _models(
        self, request: web.Request, dialect: Dialect, session: Session
    ) -> web.StreamResponse:
        card = {"id": "slime", "object": "model", "created": 0, "owned_by": "slime"}
        return json_answer({"object": "list", "data": [card]})


async def agent_server(host: str) -> AgentServer:
    """Return the server of the running event loop; the first call starts it."""
    loop = asyncio.get_running_loop()
    if loop not in _servers:
        _servers[loop] = asyncio.ensure_future(AgentServer(host).start())
    # Many samples wait for the same start. Without the shield, cancelling one of them would cancel
    # it for all.
    return await asyncio.shield(_servers[loop])


async def stop_agent_server() -> None:
    """Stop the server of the running loop; the next call of :func:`agent_server` starts another."""
    task = _servers.pop(asyncio.get_running_loop(), None)
    if task is not None:
        await (await task).stop()


async def _stream(
    request: web.Request,
    encoder: Chat | Responses | Messages,
    session: Session,
    ask: Ask,
    prepared: Place,
) -> web.StreamResponse:
    """Send the turn as server-sent events while it is generated. An error before the first token
    becomes an HTTP status; after the response has begun, an error can be sent only as an event."""
    # The turn puts its parts into a queue, whose end is None.
    parts: asyncio.Queue[tuple[str, str] | None] = asyncio.Queue()

    def show(reasoning: str, text: str) -> None:
        if text or ask.reasoning:  # while a client that takes no reasoning waits, it gets pings
            parts.put_nowait((reasoning, text))

    task = asyncio.ensure_future(session.answer(ask, prepared, show))
    task.add_done_callback(lambda _: parts.put_nowait(None))
    response = event_stream()
    sent = _Sent(encoder, ask)
    try:
        # Wait for the first part, because an error can still become a status until then.
        part = await _next(parts)
        if part is None:
            task.result()  # raises the error if the turn failed
        await response.prepare(request)
        await response.write(encoder.begin())
        # Then send part by part, and a ping where the model takes long.
        while part is not None:
            await response.write(sent.events(*part) if part else encoder.ping())
            part = await _next(parts)
        # The end: what was held back, tool calls and counts, or the error.
        try:
            turn = task.result()
            last = sent.rest(turn) + encoder.end(turn)
        except Refused as error:
            last = encoder.failed(error)
        await response.write(last)
        await response.write_eof()
    except (ConnectionError, asyncio.CancelledError):
        # The client has gone. A complete turn that it did not receive is no part of the
        # conversation.
        if task.done() and not task.cancelled() and task.exception() is None:
            _undelivered(session, [task.result()])
        raise
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return response


async def _next(parts: asyncio.Queue[tuple[str, str] | None]) -> tuple[str, str] | tuple[()] | None:
    """Return the next part of an answer, None after the last one, or an empty tuple after
    ``PING_SECONDS`` without one."""
    try:
        async with asyncio.timeout(PING_SECONDS):
            return await parts.get()
    except TimeoutError:
        return ()


class _Sent:
    """The parts of an answer that were sent. Text that may be the beginning of a tool call is held
    back while the answer streams, so a rest can remain at the end."""

    def __init__(self, encoder: Chat | Responses | Messages, ask: Ask) -> None:
        self.encoder = encoder
        self.ask = ask
        self.reasoning: list[str] = []
        self.text: list[str] = []

    def events(self, reasoning: str, text: str) -> bytes:
        """Encode a new part of the answer as events."""
        self.reasoning.append(reasoning)
        self.text.append(text)
        thought = self.encoder.think(reasoning) if reasoning and self.ask.reasoning else b""
        return thought + (self.encoder.text(text) if text else b"")

    def rest(self, turn: Turn) -> bytes:
        """Encode the rest of the complete answer that was not sent yet."""
        content = turn.answer["content"]
        reasoning = _after(turn.answer.get("reasoning_content", ""), "".join(self.reasoning))
        text = _after(content, "".join(self.text))
        return self.events(
            reasoning, text if text.strip() or not turn.answer.get("tool_calls") else ""
        )


def _after(whole: str, sent: str) -> str:
    return whole[len(sent) :] if whole.startswith(sent) else ""


def _undelivered(session: Session, turns: list[Turn]) -> None:
    for turn in turns:
        session.tree.remove(turn)
        session.counts["turns"] -= 1
        session.counts["cancelled"] += 1


async def _body(request: web.Request) -> JsonObject:
    body = await body_of(request)
    if too_deep(body):
        raise BadRequest("the body is nested too deeply")
    for name, words in _IGNORED.items():
        if body.get(name) is not None:
            note(name, words)
    if isinstance(body.get("thinking"), dict) and body["thinking"].get("type") == "enabled":
        note("thinking", "is not enforced: the model decides how much it reasons")
    if body.get("parallel_tool_calls") is False:
        note("parallel_tool_calls", "is not enforced: an answer can contain several calls")
    return body


def _refusal(dialect: Dialect, error: Refused) -> web.Response:
    # OpenAI's and Anthropic's client libraries obey this header and do not send the request again.
    return json_answer(dialect.error(error), error.status, {"x-should-retry": "false"})
