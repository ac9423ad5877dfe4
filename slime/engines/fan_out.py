"""The same call on several engines at once, and the engines that failed it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from slime.engines.handle import EngineHandle
from slime.engines.sglang_api import EngineError

T = TypeVar("T")
Failures = dict[str, Exception]
"""Engine URL to the error of that engine."""


async def on_each(
    engines: Sequence[EngineHandle], call: Callable[[EngineHandle], Awaitable[T]], what: str, deadline: float
) -> tuple[dict[str, T], Failures]:
    """``call`` on all engines at the same time; returns results and failures by URL.

    An engine that does not answer within ``deadline`` seconds has failed, too. Errors that are not the
    engine's (anything but :class:`EngineError`, :class:`OSError`, :class:`TimeoutError`) propagate.
    """
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
