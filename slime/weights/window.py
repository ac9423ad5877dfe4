"""The engines' side of a weight update: what they say about themselves before it, and the window in
which they are paused, with the outcome on each of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from slime.config.engine import OUTER_CACHE, outer_caches
from slime.engines.handle import EngineHandle, Failures, on_each
from slime.engines.sglang_api import EngineError, EngineInfo, PauseMode
from slime.weights import audit
from slime.weights.transports import SendResult

if TYPE_CHECKING:
    import torch

TORN = "-torn"
"""The end of the version of an engine with a mix of two versions. The engine stays paused, because
no sample may have this version."""


async def describe(engine: EngineHandle) -> EngineInfo:
    """Return the description of an engine that can be updated.

    Raises:
        EngineError: The engine does not answer, or its KV cache would outlive the update. slime
            starts no such server, but external engines are started by others.
    """
    info = await engine.info()
    if options := outer_caches(info.extra):
        raise EngineError(
            f"{engine.url} was started with {options[0]}: {OUTER_CACHE}: start it without"
        )
    return info


def engine_dtype(infos: Iterable[EngineInfo], rollout_dtype: str | None) -> torch.dtype | None:
    """Return the dtype of the weights on all engines.

    If the engines have different dtypes or do not report them, it is ``--rollout-dtype``. None
    means that tensors are sent without a cast.
    """
    import torch

    names = {info.dtype.removeprefix("torch.") for info in infos}
    name = names.pop() if len(names) == 1 else None
    dtype = getattr(torch, name, None) if name else None
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, rollout_dtype) if rollout_dtype else None
    return dtype


class UpdateWindow:
    """The window of one update, which the transport opens before it sends the first bytes and the
    sender closes.

    An engine that fails a step is added to :attr:`failed` and does not take part in later steps.

    Args:
        version: The version of the update.
        bracketed: Whether ``begin_update`` and ``end_update`` must be called before and after the
            tensors are sent.
        check_equal: Whether to overwrite the weights before the update and compare them with the
            old ones afterwards.
        pause_mode: ``--update-weight-pause-mode``.
        deadline: The time limit of each step in seconds.
        adapter: The description of the adapter whose factors the update contains; None if it
            contains weights only.
        ends_requests: Whether ``pause_mode`` is used for engines without requests too. SGLang
            replaces an adapter only when its last request has ended, and a request may hold it
            before the engine counts the request.

    Attributes:
        adapter_only: Whether nothing but an adapter changes that engines load by name.
        opened, closed: The times of ``time.perf_counter()``; 0 before the event.
        entered: The engines that are paused and ready for the update.
    """

    def __init__(
        self,
        version: str,
        bracketed: bool,
        check_equal: bool,
        pause_mode: str | None,
        deadline: float,
        adapter: Mapping[str, object] | None = None,
        ends_requests: bool = False,
    ) -> None:
        self.version = version
        self.bracketed = bracketed
        self.check_equal = check_equal
        self.pause_mode = pause_mode
        self.deadline = deadline
        self.adapter = adapter
        self.ends_requests = ends_requests
        self.adapter_only = False
        self.opened = self.closed = 0.0
        self.entered: list[EngineHandle] = []
        self.failed: Failures = {}
        # before the weights are overwritten, by URL
        self._checksums: dict[str, dict[str, str]] = {}

    async def open(
        self, engines: Sequence[EngineHandle], adapter_only: bool = False
    ) -> list[EngineHandle]:
        """Pause, flush and begin the update on all engines, and return those that are ready."""
        # The flush must come after the pause; otherwise requests could compute KV of the old
        # weights after the flush.
        self.opened = time.perf_counter()
        self.adapter_only = adapter_only
        ready = await self._each(engines, self.pause_and_flush, "pause and flush")
        if self.check_equal:
            ready = await self._each(ready, self._overwrite, "overwrite its weights")
        if self.bracketed:
            ready = await self._each(
                ready, lambda engine: engine.begin_update(), "begin the update"
            )
        if (adapter := self.adapter) is not None:
            ready = await self._each(
                ready, lambda engine: engine.set_adapter_layers(adapter), "add the adapter"
            )
        self.entered = ready
        return ready

    async def close(self, result: SendResult) -> tuple[list[EngineHandle], list[EngineHandle]]:
        """End the update and continue generation.

        Returns:
            The engines that generate with the new weights, and the torn engines.
        """
        self.failed.update(result.failed)
        torn = [engine for engine in self.entered if engine.url in result.torn]
        whole = [
            engine
            for engine in self.entered
            if engine not in torn and engine.url not in self.failed
        ]
        # Torn engines are marked first: if a later step fails, no engine may continue with a
        # version that it lacks.
        await self.mark_torn(torn)
        if self.bracketed:
            whole = await self._each(
                whole, lambda engine: engine.end_update(self.version), "end the update"
            )
        if self.check_equal:
            await audit.check_restored(whole, self._checksums, self.deadline)
        # A full update of the weights leaves memory behind, which the trainer may need. An adapter
        # does not.
        empty = not self.adapter_only
        whole = await self._each(
            whole, lambda engine: engine.continue_generation(empty), "continue generation"
        )
        self.closed = time.perf_counter()
        return whole, torn

    async def mark_torn(self, engines: Sequence[EngineHandle]) -> None:
        """End the update with a version that no sample may have. These engines stay paused."""
        if self.bracketed:
            torn = f"{self.version}{TORN}"
            await on_each(
                engines, lambda engine: engine.end_update(torn), "end the update", self.deadline
            )

    async def pause_and_flush(self, engine: EngineHandle) -> None:
        """Pause the engine, and flush its KV cache, which belongs to the old weights."""
        if self.adapter_only and engine.capabilities.adapter_cache_keys:
            # The KV cache of the base and of other adapters stays valid, and no request finds that
            # of the old version.
            await engine.pause(self._busy_mode(engine))
            return
        # If there are no requests, the mode makes no difference, and ``in_place`` is the fastest.
        mode = (
            self._busy_mode(engine)
            if self.ends_requests or await self._has_requests(engine)
            else None
        )
        if mode is None:
            await engine.pause("in_place")
            try:
                await engine.flush_cache()
                return
            except EngineError:  # a request arrived after the load was read and before the pause
                mode = self._busy_mode(engine)
                if mode == "abort":
                    # SGLang ends an aborted request after its next pass, and a paused engine has
                    # none: it would wait for the request for ever.
                    await engine.continue_generation(False)
        if mode == "abort" and not (self.ends_requests or engine.capabilities.retract):
            # SGLang's mode ``abort`` looks whether the requests have ended before the pass in which
            # they end, and then waits for a second. ``retract`` completes that pass. Requests that
            # came meanwhile are queued then, where an abort ends them at once.
            await engine.abort()
            await engine.pause("retract")
            await engine.abort()
            with contextlib.suppress(EngineError):  # one was still being tokenized
                return await engine.flush_cache()
        await engine.pause(mode)
        if mode != "in_place":  # requests that continue in place keep their KV cache
            await engine.flush_cache()

    async def _has_requests(self, engine: EngineHandle) -> bool:
        load = await engine.load()
        return bool(load["running"] or load["waiting"])

    def _busy_mode(self, engine: EngineHandle) -> PauseMode:
        """Return the mode for an engine with requests: that of the flag, or by default ``retract``
        if the engine supports it and ``abort`` otherwise. Both keep the tokens generated so far.

        Raises:
            EngineError: The flag asks for a mode that the engine cannot use for updates.
        """
        # after a drain, only requests of other clients can be running
        if self.pause_mode in (None, "drain"):
            return "retract" if engine.capabilities.retract else "abort"
        if self.pause_mode == "retract" and not engine.capabilities.retract:
            raise EngineError(
                f"{engine.url} cannot update weights in pause mode retract: use "
                "--update-weight-pause-mode abort"
            )
        if self.pause_mode == "in_place" and not engine.capabilities.version_spans:
            raise EngineError(
                f"{engine.url} does not report the weight version of each token, so responses "
                "that continue in place would have the wrong version: use "
                "--update-weight-pause-mode abort"
            )
        return cast(PauseMode, self.pause_mode)

    async def _overwrite(self, engine: EngineHandle) -> None:
        self._checksums[engine.url] = await audit.overwrite(engine)

    async def _each(
        self,
        engines: Sequence[EngineHandle],
        call: Callable[[EngineHandle], Awaitable[None]],
        what: str,
    ) -> list[EngineHandle]:
        """Await ``call`` for all engines, and return those that did not fail."""
        _, failed = await on_each(engines, call, what, self.deadline)
        self.failed.update(failed)
        return [engine for engine in engines if engine.url not in failed]
