"""What the routes for generation ask of an engine, so that they can serve another one too; and its
answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple

from aiohttp import web

from slime.plugins.embedded.sequence import Detokenizer, FinishReason, Sequence
from slime.plugins.http.server import SERVING, Refused, json_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime.plugins.embedded.engine import Engine
    from slime.plugins.embedded.images import ImageReader
    from slime.plugins.embedded.loading import Loaded
    from slime.plugins.embedded.protocol import GenerateRequest

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

Listener = Callable[[Sequence, int, FinishReason | None, str], None]
"""Called on the event loop with a sequence, the number of its output tokens so far, its finish
reason (None while it runs), and the weight version of the last token.
"""


class Generates(Protocol):
    """An engine.

    Attributes:
        failure: Why the engine computes nothing any more; None if it works.
        last_step: When it last computed a token, as ``time.monotonic()``.
        resting: Whether it computes nothing because it was asked not to.
        idle: Whether there is nothing to compute.
    """

    @property
    def failure(self) -> BaseException | None: ...

    @property
    def last_step(self) -> float: ...

    @property
    def resting(self) -> bool: ...

    @property
    def idle(self) -> bool: ...

    async def call(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Call ``function`` between two steps, and return its result."""

    async def submit(self, request: GenerateRequest, listener: Listener) -> Sequence:
        """Queue a request."""

    def abort(self, rid: str | None, exact: bool = False) -> None:
        """End the requests whose ids begin with ``rid``, or all of them; called by :meth:`call`."""


class Served(Protocol):
    """An engine with what belongs to its model. ``images`` is None for text models."""

    @property
    def engine(self) -> Generates: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def detokenizer(self) -> Detokenizer: ...

    @property
    def images(self) -> Callable[[], ImageReader] | None: ...

    @property
    def context_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def model_path(self) -> str: ...


SERVED: web.AppKey[Served] = web.AppKey("served")
"""The engine of an application."""
LOADED: web.AppKey[Loaded] = web.AppKey("loaded")


def engine_of(request: web.Request) -> Engine:
    return request.app[LOADED].engine


ENGINES_SERVING = SERVING | {"keepalive_timeout": 3600.0}
"""How aiohttp serves an engine: its clients and routers close idle connections, not the engine."""


class WeightError(Refused, ValueError):
    """An update does not fit this model. The message names the tensor."""


class TooManyRequests(Refused, RuntimeError):
    """The queue is full. A retry, later or on another engine, may succeed."""

    status = 503


class StepFailed(Refused, RuntimeError):
    """The computation of a sequence raised an exception, which the engine has logged."""

    status = 500


def outcome(success: bool, message: str, **more: object) -> web.Response:
    """Return the response to a control call, in SGLang's format."""
    return json_answer({"success": success, "message": message, **more}, 200 if success else 400)
