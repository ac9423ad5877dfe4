"""The time in which the engines are paused for a weight update, and the outcome on each of them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from slime.engines.fan_out import Failures, on_each
from slime.engines.handle import EngineHandle
from slime.engines.sglang_api import EngineError, PauseMode
from slime.weights import audit
from slime.weights.transports import SendResult

TORN = "-torn"
"""Ends the version of an engine that holds a mix of two versions. No sample may carry it: the engine stays paused."""


class UpdateWindow:
    """Opened by the transport when the first bytes are about to go, and closed by the sender when all have gone.

    An engine that fails a step is noted in :attr:`failed` and left out of the steps that follow.

    Args:
        version: of the update.
        bracketed: tensors go between ``begin_update`` and ``end_update``.
        check_equal: overwrite the weights before the update, and compare them with what they were afterwards.
        pause_mode: ``--update-weight-pause-mode``.
        deadline: seconds for each step.

    Attributes:
        opened, closed: ``time.perf_counter()``; 0 before.
        entered: engines that were paused and are ready for the update.
    """

    def __init__(
        self, version: str, bracketed: bool, check_equal: bool, pause_mode: str | None, deadline: float
    ) -> None:
        self.version, self.bracketed, self.check_equal = version, bracketed, check_equal
        self.pause_mode, self.deadline = pause_mode, deadline
        self.opened = self.closed = 0.0
        self.entered: list[EngineHandle] = []
        self.failed: Failures = {}
        self._checksums: dict[str, dict[str, str]] = {}  # from before the overwriting, by URL

    async def open(self, engines: Sequence[EngineHandle]) -> list[EngineHandle]:
        """Pause, flush and begin on all engines; returns those that are ready."""
        # The flush comes after the pause: KV that is computed later would be of the old weights.
        self.opened = time.perf_counter()
        ready = await self._each(engines, self.pause_and_flush, "pause and flush")
        if self.check_equal:
            ready = await self._each(ready, self._overwrite, "overwrite its weights")
        if self.bracketed:
            ready = await self._each(ready, lambda engine: engine.begin_update(), "begin the update")
        self.entered = ready
        return ready

    async def close(self, result: SendResult) -> tuple[list[EngineHandle], list[EngineHandle]]:
        """End the update and continue; returns the engines that generate with the new weights, and the torn ones."""
        self.failed.update(result.failed)
        torn = [engine for engine in self.entered if engine.url in result.torn]
        whole = [engine for engine in self.entered if engine not in torn and engine.url not in self.failed]
        # Torn engines first: whatever fails below, no engine may continue under a version that it does not hold.
        await self.mark_torn(torn)
        if self.bracketed:
            whole = await self._each(whole, lambda engine: engine.end_update(self.version), "end the update")
        if self.check_equal:
            await audit.check_restored(whole, self._checksums, self.deadline)
        whole = await self._each(whole, lambda engine: engine.continue_generation(), "continue generation")
        self.closed = time.perf_counter()
        return whole, torn

    async def mark_torn(self, engines: Sequence[EngineHandle]) -> None:
        """Close the brackets under a version that no sample may carry; these engines stay paused."""
        if self.bracketed:
            torn = f"{self.version}{TORN}"
            await on_each(engines, lambda engine: engine.end_update(torn), "end the update", self.deadline)

    async def pause_and_flush(self, engine: EngineHandle) -> None:
        """Pause as little as the engine's load allows, and flush its KV cache, which belongs to the old weights."""
        load = await engine.load()
        # Where nothing runs, no mode has anything to do, and ``in_place`` is the quickest.
        mode = self._busy_mode(engine) if load["running"] or load["waiting"] else None
        await engine.pause(mode or "in_place")
        if mode is None:
            try:
                await engine.flush_cache()
                return
            except EngineError:  # a request slipped in between the question and the pause
                mode = self._busy_mode(engine)
                await engine.pause(mode)
        if mode != "in_place":  # requests that continue in place keep their KV cache
            await engine.flush_cache()

    def _busy_mode(self, engine: EngineHandle) -> PauseMode:
        """The mode that the flag asks for. By default requests keep their tokens and their KV cache is computed again,
        where the engine can do that; where it cannot, they end with the tokens that they have."""
        if self.pause_mode in (None, "drain"):  # after a drain only requests of other clients can be running
            return "retract" if engine.capabilities.retract else "abort"
        if self.pause_mode == "in_place" and not engine.capabilities.version_spans:
            raise EngineError(
                f"{engine.url} does not say which weights made which token, so responses that continue in place would "
                "carry the wrong version: use --update-weight-pause-mode abort"
            )
        return cast(PauseMode, self.pause_mode)

    async def _overwrite(self, engine: EngineHandle) -> None:
        self._checksums[engine.url] = await audit.overwrite(engine)

    async def _each(
        self, engines: Sequence[EngineHandle], call: Callable[[EngineHandle], Awaitable[None]], what: str
    ) -> list[EngineHandle]:
        """``call`` on all engines; returns those that did not fail."""
        _, failed = await on_each(engines, call, what, self.deadline)
        self.failed.update(failed)
        return [engine for engine in engines if engine.url not in failed]
