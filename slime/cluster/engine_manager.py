"""The part of the rollout manager that starts engines, monitors them, and prepares them for weight
updates.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cluster.engine import ASK_SECONDS, EngineStatus, FleetSettings, launcher
from slime.cluster.engine_fleet import EngineFleet
from slime.cluster.health import EngineLoads, HealthMonitor, unhealthy
from slime.cluster.placement import Placement, thread_environment
from slime.cluster.rollout_workers import RolloutWorkers, parts_of_workers, worker_launcher
from slime.config.machine import raise_file_limit
from slime.config.rollout import may_use_workers
from slime.data.tokenizers import preload_tokenizer
from slime.engines.background import run
from slime.engines.handle import EngineHandle, on_each
from slime.engines.http import init_http_client, take_retries, watch_faults
from slime.engines.launch import EngineSettings, RouterSettings, plan_engines
from slime.engines.sglang_api import EngineError, MemoryTag
from slime.observability import progress
from slime.observability.run_dir import RunDir

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.engines.keys import RunKeys

CONTROL_DEADLINE_SECONDS = 600.0
IDLE_DEADLINE_SECONDS = 60.0


class EngineManager:
    """Owns the engines, their router and their health checks, in the process of the rollout
    manager.

    Attributes:
        args: Passed to users' functions. Replaced once the addresses of the engines are known, but
            never modified.
    """

    def __init__(self, args: Args, log_dir: Path, keys: RunKeys) -> None:
        self.args = args
        self.log_dir = log_dir
        self.keys = keys
        self._fleet: EngineFleet | None = None
        self._monitor: HealthMonitor | None = None
        self.loads: EngineLoads | None = None
        self.workers: RolloutWorkers | None = None

    def start_engines(self, placement: Placement) -> list[str]:
        """Start all engines at the same time, then the router if it is needed; returns the engine
        URLs.
        """
        raise_file_limit()  # The router inherits the limit, because it is a child of this process.
        args = self.args
        keys = self.keys
        # How engines are started, and what is done with those that are lost.
        specs = plan_engines(args)
        environment = thread_environment(args.threads_per_process)
        engine_settings = EngineSettings.from_args(args, keys.engine)
        launch = launcher(
            engine_settings, args.start_timeout, specs, placement, self.log_dir, environment
        )
        external = [
            url if "://" in url else f"http://{url}"
            for url in args.rollout_external_engine_addrs or []
        ]
        workers = args.rollout_workers if args.rollout_workers > 1 and may_use_workers(args) else 0
        settings = FleetSettings(
            router=RouterSettings.from_args(args, keys),
            tolerant=bool(args.use_fault_tolerance),
            always_routed=bool(args.use_router),
            updated=not args.debug_rollout_only,
            start_seconds=args.start_timeout,
            workers=workers,
        )
        # Stored before the start, so that a shutdown during the start ends the engines that were
        # launched.
        self._fleet = fleet = EngineFleet(settings, self.log_dir, launch, specs, external, keys)
        # The first request would wait for the tokenizer. Not on another thread: imports of
        # transformers on two threads at once can fail.
        meanwhile = partial(preload_tokenizer, args.hf_checkpoint, args.trust_remote_code)
        urls = fleet.start(
            lambda done, total: progress.report("start engines", done, total), meanwhile
        )
        self.args = args.with_values(**fleet.addresses)
        init_http_client(self.args)
        # Who watches the engines: health checks, which a failed request causes at once, and the
        # record of their load.
        self._monitor = monitor = HealthMonitor(
            fleet,
            args.rollout_health_check_interval,
            args.rollout_health_check_timeout,
            args.rollout_health_check_first_wait,
            args.start_timeout,
        )
        monitor.start()
        watch_faults(monitor.wake)
        self.loads = EngineLoads(
            fleet.engines, lambda: monitor.paused, RunDir(self.log_dir.parent).engines
        )
        self.loads.start()
        # Rollout workers, each with the address of its share of the engines.
        if workers:
            parts = parts_of_workers(workers, fleet.shares, len(fleet.engines))
            args_of_workers = [
                self.args.with_values(**fleet.addresses_of(number)) for number in range(workers)
            ]
            launch_worker = worker_launcher(args_of_workers, parts, self.log_dir, environment)
            self.workers = RolloutWorkers(launch_worker, parts, args.start_timeout, monitor.wake)
            self.workers.start()
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
        """The engines by state; answers while :meth:`generate` runs."""
        return self.fleet.status()

    def begin_update(self) -> EngineStatus:
        """Pause the health checks, because the engines will load weights; returns the engines by
        state.
        """
        self.monitor.pause("update")
        return self.fleet.status()

    def end_update(self, urls: Sequence[str]) -> EngineStatus:
        """Let engines serve that hold the current weights and passed the audit; the health checks
        continue.
        """
        self.fleet.synced(urls)
        self.monitor.resume("update")
        return self.fleet.status()

    def lose_engines(self, blamed: dict[str, str] | None) -> EngineStatus:
        """Find out which engines are lost after a call to the engines failed; returns the engines
        by state.

        Lost are those whose process has ended, and those that are blamed for the failure. If there
        are none of either kind, those that generate no token are lost.

        Args:
            blamed: Reasons by URL; None: only engines whose process has ended are lost.
        """
        gone = self.monitor.processes.ended(ASK_SECONDS)
        lost = {**(blamed or {}), **gone}
        # Only without a culprit: an engine whose update was interrupted generates no token either,
        # but gets all weights again when the call is repeated.
        if not lost and blamed is not None:
            lost = unhealthy(self.fleet.urls(), self.args.rollout_health_check_timeout)
        self.fleet.lose(lost)
        return self.fleet.status()

    def start_lost_engines(self) -> EngineStatus:
        """Restart lost engines now, wait for them, and return the engines by state."""
        self.fleet.settled()  # restart_lost skips an engine whose processes are still being ended.
        self.fleet.restart_lost()
        self.fleet.settled()
        return self.fleet.status()

    def offload(self) -> None:
        """Let the engines release their memory for the trainer (colocated runs)."""
        # The pause first, so that no engine is restarted after the wait: a starting engine would
        # take memory while the trainer takes it, too.
        self.monitor.pause("offloaded")
        self.fleet.settled()

        async def release(engine: EngineHandle) -> None:
            # SGLang crashes if it must release memory while it is busy.
            await flush_when_idle(engine)
            await engine.release(())

        self._on_engines(release)

    def onload(self, tags: Sequence[MemoryTag]) -> None:
        self._on_engines(lambda engine: engine.resume(tuple(tags)))
        # Without its KV cache an engine generates no token, so it would fail every health check.
        if "kv_cache" in tags:
            self.monitor.resume("offloaded")

    def _on_engines(self, call: Callable[[EngineHandle], Awaitable[None]]) -> None:
        """Call all engines at the same time. Those that fail are lost.

        Raises:
            EngineError: An engine failed, and the run is without ``--use-fault-tolerance``.
        """
        engines = [EngineHandle(url) for url in self.fleet.urls()]
        _, failed = run(
            on_each(engines, call, "release or resume its memory", CONTROL_DEADLINE_SECONDS)
        )
        for error in failed.values():
            if not self.fleet.settings.tolerant:
                raise error
        self.fleet.lose({url: str(error) for url, error in failed.items()})

    def fault_counts(self) -> dict[str, float]:
        """Metrics: requests that were retried, engines lost and restarted, since the previous
        rollout.
        """
        counts = {
            "rollout/http_retry_count": float(take_retries()),
            **(self.fleet.counts() if self._fleet else {}),
        }
        if self.workers is not None:
            counts["rollout/worker_restart_count"] = self.workers.restarts()
        return counts

    def engine_report(self) -> str:
        """One line per engine, with the last log lines of those that died."""
        return self.fleet.report() if self._fleet is not None else "no engine was started"

    def end_engines(self, at_once: bool = True) -> None:
        """Stop rollout workers, router and engines; returns when their processes have ended.

        Groups in progress fail.
        """
        # first: they would start requests again, and report engines as faulty
        if self.workers is not None:
            self.workers.stop()
        if self._monitor is not None:
            self._monitor.stop()
        if self.loads is not None:
            self.loads.stop()
        if self._fleet is not None:
            self._fleet.stop(at_once)


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
