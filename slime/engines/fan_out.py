"""Make the same call on several engines concurrently, and collect the failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from slime.engines.handle import EngineHandle
from slime.engines.sglang_api import EngineError

T = TypeVar("T")
Failures = dict[str, Exception]
"""The error of each failed engine, by engine URL."""


async def on_each(
    engines: Sequence[EngineHandle], call: Callable[[EngineHandle], Awaitable[T]], what: str, deadline: float
) -> tuple[dict[str, T], Failures]:
    """Await ``call`` for all engines concurrently, and return the results and the failures by URL.

    An engine that does not answer within ``deadline`` seconds counts as failed. Only :class:`EngineError`,
    :class:`OSError` and :class:`TimeoutError` count as failures of an engine; any other error propagates.
    """
    # With return_exceptions all calls run to their end: one failed engine does not cancel the calls to the others.
    outcomes = await asyncio.gather(
        *(_limited(engine, call, what, deadline) for engine in engines), return_exceptions=True
    )
    done: dict[str, T] = {}
    failed: Failures = {}
    for engine, outcome in zip(engines, outcomes, strict=True):
        if isinstance(outcome, EngineError | OSError):
            failed[engine.url] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            done[engine.url] = outcome
    return done, failed


async def _limited(engine: EngineHandle, call: Callable[[EngineHandle], Awaitable[T]], what: str, deadline: float) -> T:
    try:
        async with asyncio.timeout(deadline):
            return await call(engine)
    except TimeoutError as error:
        raise EngineError(f"{engine.url} did not {what} within {deadline:.0f} s") from error
