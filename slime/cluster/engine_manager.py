"""The part of the rollout manager that starts engines, watches them, and prepares them for weight updates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.engines.background import run

if TYPE_CHECKING:
    from slime.cluster.engine import EngineStatus
    from slime.cluster.engine_fleet import EngineFleet
    from slime.cluster.health import HealthMonitor
    from slime.cluster.placement import Placement
    from slime.config.args import Args
    from slime.engines.handle import EngineHandle
    from slime.engines.sglang_api import MemoryTag

CONTROL_DEADLINE_SECONDS = 600.0
IDLE_DEADLINE_SECONDS = 60.0


class EngineManager:
    """Owns the engines, their router and their health checks, in the process of the rollout manager.

    Attributes:
        args: what users' functions get; replaced when the addresses of the engines are known, never changed.
    """

    def __init__(self, args: Args, log_dir: Path) -> None:
        self.args, self.log_dir = args, log_dir
        self._fleet: EngineFleet | None = None
        self._monitor: HealthMonitor | None = None

    def start_engines(self, placement: Placement) -> list[str]:
        """Start all engines at once, then the router where there is more than one; returns engine URLs."""
        from slime.cluster.engine_actor import launcher
        from slime.cluster.engine_fleet import EngineFleet
        from slime.cluster.health import HealthMonitor
        from slime.cluster.placement import thread_environment
        from slime.config.machine import raise_file_limit
        from slime.engines.http import init_http_client, watch_faults
        from slime.engines.plan import plan_engines
        from slime.observability import progress

        raise_file_limit()  # of the router, too, which is a child of this process
        args = self.args
        specs = plan_engines(args)
        launch = launcher(args, specs, placement, self.log_dir, thread_environment(args.threads_per_process))
        external = [url if "://" in url else f"http://{url}" for url in args.rollout_external_engine_addrs or []]
        # Before the start: a shutdown during it ends the engines that were launched.
        self._fleet = fleet = EngineFleet(args, self.log_dir, launch, specs, external)
        urls = fleet.start(lambda done, total: progress.report("start engines", done, total))
        self.args = self.args.with_values(**fleet.addresses)
        init_http_client(self.args)
        self._monitor = monitor = HealthMonitor(
            fleet,
            args.rollout_health_check_interval,
            args.rollout_health_check_timeout,
            args.rollout_health_check_first_wait,
            args.start_timeout,
        )
        monitor.start()
        watch_faults(monitor.wake)
        return urls

    @property
    def fleet(self) -> EngineFleet:
        assert self._fleet is not None, "start_engines comes first"
        return self._fleet

    @property
    def monitor(self) -> HealthMonitor:
        assert self._monitor is not None, "start_engines comes first"
        return self._monitor

    def engine_status(self) -> EngineStatus:
        """Answers while :meth:`generate` runs."""
        return self.fleet.status()

    def begin_update(self) -> EngineStatus:
        """Pause the health checks, because the engines will load weights; returns URLs by state."""
        self.monitor.pause("update")
        return self.fleet.status()

    def end_update(self, urls: Sequence[str]) -> EngineStatus:
        """These engines hold the current weights and passed the audit; the health checks go on."""
        self.fleet.synced(urls)
        self.monitor.resume("update")
        return self.fleet.status()

    def lose_engines(self, blamed: dict[str, str] | None) -> EngineStatus:
        """A call to the engines failed. Those that are blamed for it, and those that make no token any more, are
        lost; with None, only those whose process has ended. Returns URLs by state, as :meth:`begin_update`."""
        from slime.cluster.engine_actor import ASK_SECONDS
        from slime.cluster.health import unhealthy

        gone = self.monitor.processes.ended(ASK_SECONDS)
        lost = {**(blamed or {}), **gone}
        if not lost and blamed is not None:  # torn engines make no token, but then there is blame
            lost = unhealthy(self.fleet.urls(), self.args.rollout_health_check_timeout)
        self.fleet.lose(lost)
        return self.fleet.status()

    def start_lost_engines(self) -> EngineStatus:
        """Start them again now, wait for them, and return URLs by state."""
        self.fleet.settled()  # one whose processes are still being ended would not be started
        self.fleet.restart_lost()
        self.fleet.settled()
        return self.fleet.status()

    def offload(self) -> None:
        """Engines give their memory to the trainer (colocated runs)."""
        self.monitor.pause("offloaded")
        self.fleet.settled()  # one that is just being started takes its memory first

        async def release(engine: EngineHandle) -> None:
            await flush_when_idle(engine)  # SGLang dies of a release while it is busy
            await engine.release(())

        self._on_engines(release)

    def onload(self, tags: Sequence[MemoryTag]) -> None:
        self._on_engines(lambda engine: engine.resume(tuple(tags)))
        if "kv_cache" in tags:
            self.monitor.resume("offloaded")

    def _on_engines(self, call: Callable[[EngineHandle], Awaitable[None]]) -> None:
        """On all engines at once. Those that fail are lost; without ``--use-fault-tolerance`` that is an error."""
        from slime.engines.fan_out import on_each
        from slime.engines.handle import EngineHandle

        engines = [EngineHandle(url) for url in self.fleet.urls()]
        _, failed = run(on_each(engines, call, "release or resume its memory", CONTROL_DEADLINE_SECONDS))
        for error in failed.values():
            if not self.fleet.tolerant:
                raise error
        self.fleet.lose({url: str(error) for url, error in failed.items()})

    def fault_counts(self) -> dict[str, float]:
        """Requests sent again, engines lost and started again, since the rollout before."""
        from slime.engines.http import take_retries

        return {"rollout/http_retry_count": float(take_retries()), **(self.fleet.counts() if self._fleet else {})}

    def engine_report(self) -> str:
        """One line per engine, with the last log lines of those that died."""
        return self.fleet.report() if self._fleet is not None else "no engine was started"

    def end_engines(self, at_once: bool = True) -> None:
        """Stop router and engines; returns when their processes are gone. What they generate fails."""
        if self._monitor is not None:
            self._monitor.stop()
        if self._fleet is not None:
            self._fleet.stop(at_once)


async def flush_when_idle(engine: EngineHandle, deadline: float = IDLE_DEADLINE_SECONDS) -> None:
    """Flush an engine's cache once nothing runs or waits on it.

    A refusal is tried again: requests that are just ending are in no count.

    Raises:
        EngineError: still not idle at the deadline (seconds).
    """
    from slime.engines.sglang_api import EngineError

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
                f"{engine.url} was not idle {deadline:.0f} s after the rollout ({busy}): it must be to release its "
                "memory. Who sends it requests?"
            )
        await asyncio.sleep(0.02)
