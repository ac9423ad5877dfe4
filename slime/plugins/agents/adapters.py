"""The adapter classes of older releases, as a facade over this package.

An adapter is an endpoint for agents that a generate function owns itself: it opens a session for a
sample, lets the agent call the endpoint, and gets the samples when the agent has ended. With
``slime.plugins.agents.rollout.generate`` slime does all of this, and also stops agents, scores
their samples and repeats them after an abort. Requests are served by
:mod:`slime.plugins.agents.server`, and the turns of a session are the tree of
:mod:`slime.plugins.agents.trajectory`.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from aiohttp import web

from slime.config.args import Args
from slime.config.resolve import resolve_defaults
from slime.config.rules import Run
from slime.data.sample import Sample
from slime.plugins.http.server import Refused
from slime.rollout.state import GenerateState
from slime.types import SamplingParams, Tokenizer

from .anthropic_api import Messages
from .messages import Ask, note
from .openai_api import Chat, Responses
from .server import DIALECTS, AgentServer, Dialect
from .session import Place, Session

if TYPE_CHECKING:
    from collections.abc import Callable

_REMEMBERED = 10_000  # ended sessions whose late requests get 503 instead of 401


class _Session(Session):
    """A session with the limits of an adapter. A request after its end gets 503, and one after the
    last turn 429.
    """

    def __init__(
        self, session_id: str, state: GenerateState, params: SamplingParams, most_turns: int | None
    ) -> None:
        super().__init__(session_id, state, Sample(session_id=session_id), params)
        # the state of a run refers to its args only weakly
        self.args = state.args
        self.most_turns = most_turns

    def check_open(self) -> None:
        if not self._open:
            raise Refused("this session has ended", 503, "session_closed")
        super().check_open()

    def prepare(self, ask: Ask) -> Place:
        self.check_open()
        if self.most_turns and self.counts["turns"] >= self.most_turns:
            raise Refused(
                f"this session has had {self.most_turns} turns, its maximum",
                429,
                "max_turns_exceeded",
            )
        return super().prepare(ask)


class _Server(AgentServer):
    def __init__(self, host: str, dialects: Mapping[str, Dialect]) -> None:
        self.ended: deque[str] = deque(maxlen=_REMEMBERED)
        super().__init__(host, dialects)

    def session_named(self, name: str) -> Session:
        if name in self.ended:
            raise Refused("this session has ended", 503, "session_closed")
        return super().session_named(name)


class BaseAdapter:
    """An endpoint whose sessions a generate function opens and finishes.

    Args:
        tokenizer: The tokenizer of the model, with a chat template.
        sglang_url: The address of the router or an engine, ``http://host:port``.
        tool_parser: A name of ``--agent-tool-parser``. Default: chosen by the model.
        reasoning_parser: A name of ``--agent-reasoning-parser``. Default: none.
        max_turns_per_sid: Maximum number of turns of a session; the next request gets status 429.
        args: The arguments that the generate function got. Default: those of a run with the model
            of ``tokenizer``.
        host: A host name by which agents reach the endpoint, if it is not an IP address or this
            machine's name.
        fork_threshold_tokens, debug_callback: Have no effect: every changed conversation becomes a
            branch.

    Attributes:
        app: The aiohttp application. An agent is identified by its API key, which is the id of its
            session.

    Raises:
        ValueError: ``sglang_url`` has another form, or there is no such parser.
    """

    dialects: Mapping[str, Dialect] = DIALECTS

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: Callable[..., object] | None = None,
        args: Args | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        for name, value in (
            ("fork_threshold_tokens", fork_threshold_tokens),
            ("debug_callback", debug_callback),
        ):
            if value is not None:
                note(f"{name} of an adapter", "has no effect")
        parsers = {
            "agent_tool_parser": tool_parser or "auto",
            "agent_reasoning_parser": reasoning_parser or "none",
        }
        self.args = _args(
            args, str(getattr(tokenizer, "name_or_path", "")), sglang_url
        ).with_values(**parsers)
        self.max_turns = max_turns_per_sid
        self.tokenizer = tokenizer
        self._server = _Server(host, self.dialects)

    @property
    def app(self) -> web.Application:
        return self._server.app

    def open_session(
        self,
        sid: str,
        *,
        sampling_defaults: Mapping[str, object] | None = None,
        max_context_tokens: int | None = None,
    ) -> str:
        """Open a session and return its id, which is the agent's API key.

        Args:
            sampling_defaults: Sampling parameters of its requests, by SGLang's names; agents do not
                choose them.
            max_context_tokens: Maximum number of tokens of a conversation. Default: that of the
                model.

        Raises:
            ValueError: There is a session with this id.
        """
        if sid in self._server.sessions:
            raise ValueError(f"session {sid!r} is open already: finish or drop it first")
        defaults = dict(sampling_defaults or {})
        args = self.args.with_values(
            rollout_max_context_len=max_context_tokens or self.args.rollout_max_context_len,
            rollout_max_response_len=defaults.get("max_new_tokens")
            or self.args.rollout_max_response_len,
        )
        state = GenerateState(args)
        state.__dict__["tokenizer"] = self.tokenizer
        params = cast("SamplingParams", {**state.sampling_params, **defaults})
        self._server.sessions[sid] = _Session(sid, state, params, self.max_turns)
        return sid

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] | None = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        max_sample_tokens: int = 0,
    ) -> list[Sample]:
        """End a session, and return a sample for each leaf of its tree. Each answer is trained in
        one of them.

        Args:
            base_sample: The sample of the generate function; the results are copies with its ids
                and metadata.
            reward: The reward of every sample.
            extra_metadata: Added to the metadata of every sample.
            max_sample_tokens: Responses are cut where prompt and response have more tokens
                together; 0 for no limit.

        Raises:
            KeyError: There is no such session.
            Exception: The first error of an engine in this session.
        """
        session = self._server.sessions[sid]
        await self.drop_session(sid)
        if session.fault is not None:
            raise session.fault
        samples = session.tree.samples(session.state, base_sample)
        for sample in samples:
            sample.metadata.update(extra_metadata or {})
            sample.reward = copy.copy(reward)
            over = sample.num_tokens - max_sample_tokens
            if max_sample_tokens and over > 0:
                self._cut(sample, max(sample.response_length - over, 0))
        return samples

    def _cut(self, sample: Sample, length: int) -> None:
        response = sample.tokens[len(sample.tokens) - sample.response_length :][:length]
        sample.cut_response(length, str(self.tokenizer.decode(response)))

    async def shutdown_session(self, sid: str) -> None:
        """Refuse further requests of a session with status 503 and cancel those that are being
        served. Its samples can still be fetched with :meth:`finish_session`."""
        session = self._server.sessions.get(sid)
        if session is None:
            return
        running = {task for task in session.tasks if task.get_loop() is asyncio.get_running_loop()}
        others = session.tasks - running
        session.tasks = running
        session.close()
        for task in others:  # the application may run on the event loop of another thread
            task.get_loop().call_soon_threadsafe(task.cancel)
        await asyncio.gather(*running, return_exceptions=True)

    async def drop_session(self, sid: str) -> None:
        """End a session without samples; does nothing if there is none."""
        await self.shutdown_session(sid)
        if self._server.sessions.pop(sid, None) is not None:
            self._server.ended.append(sid)


class OpenAIAdapter(BaseAdapter):
    """Serves Chat Completions (``/v1/chat/completions``) and Responses (``/v1/responses``)."""

    dialects: Mapping[str, Dialect] = {"chat/completions": Chat, "responses": Responses}


class AnthropicAdapter(BaseAdapter):
    """Serves Messages (``/v1/messages``)."""

    dialects: Mapping[str, Dialect] = {"messages": Messages}


def _args(args: Args | None, model: str, sglang_url: str) -> Args:
    address = urlsplit(sglang_url if "://" in sglang_url else f"http://{sglang_url}")
    if not address.hostname or not address.port:
        raise ValueError(f"sglang_url {sglang_url!r} does not have the form http://host:port")
    if args is None:
        args = Args(hf_checkpoint=model, rollout_backend="sglang")
        if problems := resolve_defaults(Run(args)):
            raise ValueError("; ".join(problems))
    return args.with_values(sglang_router_ip=address.hostname, sglang_router_port=address.port)


__all__ = ["AnthropicAdapter", "BaseAdapter", "OpenAIAdapter"]
