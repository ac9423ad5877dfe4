"""The same call on several engines at once, and who failed it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from slime.engines.handle import EngineError, EngineHandle

T = TypeVar("T")
Failures = dict[str, Exception]
"""Engine URL to what went wrong there."""


class WeightSyncError(RuntimeError):
    """A weight sync did not reach every engine.

    Attributes:
        failed: engines that are to blame, by URL: dead, hung or refusing. Their weights are undefined.
        torn: engines that live but hold a mix of old and new tensors (another engine's failure ended
            their broadcast). They stay paused; the next complete sync heals them.
        synced: engines that hold ``version`` and generate again.
    """

    def __init__(
        self, version: str, failed: Mapping[str, Exception], torn: Sequence[str], synced: Sequence[str]
    ) -> None:
        self.version, self.failed, self.torn, self.synced = version, dict(failed), list(torn), list(synced)
        reasons = "; ".join(f"engine {url}: {type(error).__name__}: {error}" for url, error in failed.items())
        rest = [
            f"{', '.join(urls)} {what}" for urls, what in ((torn, "must be synced again"), (synced, "updated")) if urls
        ]
        super().__init__(f"weights {version} did not reach every engine: {'; '.join([reasons or 'no engine', *rest])}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.version, self.failed, self.torn, self.synced)


async def on_each(
    engines: Sequence[EngineHandle],
    call: Callable[[EngineHandle], Awaitable[T]],
    what: str,
    deadline: float,
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
