"""What the driver asks of the engines: before, during and after a weight update, and in colocated
runs around a training step.

The rollout manager holds the fleet; the driver names one of these functions in its call
(:meth:`RolloutManager.on_engines <slime.cluster.rollout_manager.RolloutManager.on_engines>`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from slime.cluster.engine import ASK_SECONDS, EngineStatus
from slime.cluster.health import unhealthy
from slime.engines.background import run
from slime.engines.handle import EngineHandle, on_each
from slime.engines.sglang_api import EngineError, MemoryTag

if TYPE_CHECKING:
    from slime.cluster.engine_fleet import EngineFleet

CONTROL_DEADLINE_SECONDS = 600.0
IDLE_DEADLINE_SECONDS = 60.0


def begin_update(fleet: EngineFleet) -> EngineStatus:
    """Pause the health checks, because the engines will load weights; returns the engines by
    state.
    """
    fleet.monitor.pause("update")
    return fleet.status()


def end_update(fleet: EngineFleet, urls: Sequence[str]) -> EngineStatus:
    """Let engines serve that hold the current weights and passed the audit; the health checks
    continue.
    """
    fleet.synced(urls)
    fleet.monitor.resume("update")
    return fleet.status()


def lose_engines(fleet: EngineFleet, blamed: dict[str, str] | None) -> EngineStatus:
    """Find out which engines are lost after a call to the engines failed; returns the engines by
    state.

    Lost are those whose process has ended, and those that are blamed for the failure. If there are
    none of either kind, those that generate no token are lost.

    Args:
        blamed: Reasons by URL; None: only engines whose process has ended are lost.
    """
    lost = {**(blamed or {}), **fleet.monitor.processes.ended(ASK_SECONDS)}
    # Only without a culprit: an engine whose update was interrupted generates no token either, but
    # gets all weights again when the call is repeated.
    if not lost and blamed is not None:
        lost = unhealthy(fleet.urls(), fleet.settings.check_timeout)
    fleet.lose(lost)
    return fleet.status()


def start_lost_engines(fleet: EngineFleet) -> EngineStatus:
    """Restart lost engines now, wait for them, and return the engines by state."""
    fleet.settled()  # restart_lost skips an engine whose processes are still being ended.
    fleet.restart_lost()
    fleet.settled()
    return fleet.status()


def offload(fleet: EngineFleet) -> None:
    """Let the engines release their memory for the trainer (colocated runs)."""
    # The pause first, so that no engine is restarted after the wait: a starting engine would take
    # memory while the trainer takes it, too.
    fleet.monitor.pause("offloaded")
    fleet.settled()

    async def release(engine: EngineHandle) -> None:
        # SGLang crashes if it must release memory while it is busy.
        await flush_when_idle(engine)
        await engine.release(())

    call_each(fleet, release)


def onload(fleet: EngineFleet, tags: Sequence[MemoryTag]) -> None:
    """Let the engines take memory again."""
    call_each(fleet, lambda engine: engine.resume(tuple(tags)))
    # Without its KV cache an engine generates no token, so it would fail every health check.
    if "kv_cache" in tags:
        fleet.monitor.resume("offloaded")


def call_each(fleet: EngineFleet, call: Callable[[EngineHandle], Awaitable[None]]) -> None:
    """Call all engines at the same time. Those that fail are lost.

    Raises:
        EngineError: An engine failed, and the run is without ``--use-fault-tolerance``.
    """
    engines = [EngineHandle(url) for url in fleet.urls()]
    what = "release or resume its memory"
    _, failed = run(on_each(engines, call, what, CONTROL_DEADLINE_SECONDS))
    if failed and not fleet.settings.tolerant:
        raise next(iter(failed.values()))
    fleet.lose({url: str(error) for url, error in failed.items()})


async def flush_when_idle(engine: EngineHandle, deadline: float = IDLE_DEADLINE_SECONDS) -> None:
    """Flush an engine's cache as soon as no request runs or waits in it.

    A refused flush is tried again: the engine may still be ending a request that it no longer
    counts.

    Raises:
        EngineError: The engine is still not idle after ``deadline`` seconds.
    """
    until = time.monotonic() + deadline
    while True:
        load = await engine.load()
        busy = f"{load['running']} running and {load['waiting']} waiting requests"
        if not (load["running"] or load["waiting"]):
            try:
                return await engine.flush_cache()
            except EngineError as error:
                busy = str(error)
        if time.monotonic() > until:
            raise EngineError(
                f"{engine.url} was not idle {deadline:.0f} s after the rollout ({busy}), as it "
                "must be to release its memory. Find out which program still sends it requests"
            )
        await asyncio.sleep(0.02)
