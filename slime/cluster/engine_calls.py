"""The engines in the rollout manager's process: their start, and what the driver asks of them
before, during and after a weight update, and in colocated runs around a training step.

The rollout manager holds the fleet; the driver names one of these functions in its call
(:meth:`RolloutManager.on_engines <slime.cluster.rollout_manager.RolloutManager.on_engines>`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slime.cluster.actors import ActorHandle, door
from slime.cluster.engine import ASK_SECONDS, EngineActor, EngineStatus, FleetSettings, LoadRecord
from slime.cluster.engine_fleet import EngineFleet
from slime.cluster.health import unhealthy
from slime.cluster.placement import Placement, thread_environment
from slime.config.rollout import may_use_workers
from slime.engines.background import run
from slime.engines.handle import EngineHandle, on_each
from slime.engines.http import watch_faults
from slime.engines.launch import EngineSettings, RouterSettings, plan_engines
from slime.engines.sglang_api import EngineError, MemoryTag
from slime.observability.run_dir import RunDir
from slime.registry import find
from slime.rollout.group import GroupGenerator

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.engines.keys import RunKeys

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
    _, failed = run(
        on_each(engines, call, "release or resume its memory", CONTROL_DEADLINE_SECONDS)
    )
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


# --- the start -----------------------------------------------------------------------------------


def fleet_of(args: Args, placement: Placement, log_dir: Path, keys: RunKeys) -> EngineFleet:
    """The engines that the flags ask for, before their start; a run that only trains has none."""
    specs = [] if args.debug_train_only else plan_engines(args)
    uses_workers = args.rollout_workers > 1 and may_use_workers(
        args.rollout_function_path, args.eval_function_path
    )
    settings = FleetSettings(
        router=RouterSettings.of(args, args.router, keys),
        tolerant=args.use_fault_tolerance,
        always_routed=args.use_router or args.use_fault_tolerance,
        updated=not args.debug_rollout_only,
        start_seconds=args.start_timeout,
        workers=args.rollout_workers if uses_workers else 0,
        check_interval=args.rollout_health_check_interval,
        check_timeout=args.rollout_health_check_timeout,
        first_wait=args.rollout_health_check_first_wait,
    )
    environment = thread_environment(args.threads_per_process)
    engine_settings = EngineSettings.from_args(args, keys.engine)

    def launch(index: int) -> list[ActorHandle]:
        """Start an engine, in one actor per node that it spans."""
        spec = specs[index]
        nodes = placement.engine_nodes(spec.slot, spec.num_gpus)
        # The port may be in use on that node. Then this start fails with SGLang's error, and a
        # restart picks another.
        rendezvous = f"{nodes[0][1]}:{random.randint(20000, 29999)}" if len(nodes) > 1 else None
        # With several threads, an actor can report on its server, or kill it, while wait_ready()
        # blocks.
        return [
            door().create(
                EngineActor,
                engine_settings,
                args.start_timeout,
                spec,
                log_dir,
                gpus,
                (rank, len(nodes), rendezvous),
                options=placement.engine_options(slot),
                environment=environment,
                threads=3,
            )
            for rank, (slot, _, gpus) in enumerate(nodes)
        ]

    external = [
        url if "://" in url else f"http://{url}" for url in args.rollout_external_engine_addrs or ()
    ]
    return EngineFleet(settings, log_dir, launch, specs, external, keys)


class Workers(GroupGenerator, Protocol):
    """Processes that generate groups, as the rollout manager sees them (``--rollout-workers``)."""

    def stop(self) -> None:
        """End all of them. Groups in progress fail."""

    def restarts(self) -> float:
        """Return the number of those that were started again since the last call."""


def watch_engines(fleet: EngineFleet) -> None:
    """Begin the health checks, which a failed request causes at once, and the record of the load."""
    monitor = fleet.monitor
    monitor.start()
    watch_faults(monitor.wake)
    file = RunDir(fleet.log_dir.parent).engines
    loads: LoadRecord = find("record", "engine loads")(fleet.engines, lambda: monitor.paused, file)
    loads.start()
    fleet.loads = loads
