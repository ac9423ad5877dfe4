"""The Ray actor between data and training: data source, engines, router and the rollout function."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.cluster.garbage import GarbageCollection
from slime.engines.background import run

if TYPE_CHECKING:
    from slime.checkpoint.shared_folder import Answer
    from slime.cluster.engine import EngineStatus
    from slime.cluster.engine_fleet import EngineFleet
    from slime.cluster.health import HealthMonitor
    from slime.cluster.manager_client import RolloutBatch
    from slime.cluster.placement import Placement
    from slime.cluster.rollout_state import Rollout
    from slime.config.args import Args
    from slime.config.layout import ParallelLayout
    from slime.engines.handle import EngineHandle
    from slime.engines.sglang_api import MemoryTag
    from slime.rollout.fully_async_rollout import StandingPool

logger = logging.getLogger(__name__)
CONTROL_DEADLINE_SECONDS = 600.0
IDLE_DEADLINE_SECONDS = 60.0


class RolloutManager:
    """One per run. Generation runs on one thread; :meth:`status` answers meanwhile on another."""

    def __init__(self, args: Args, run_dir: str, layout: ParallelLayout) -> None:
        import ray

        from slime.cluster.logs import redirect_output
        from slime.cluster.rollout_state import RolloutState
        from slime.config.hooks import load_function
        from slime.engines.process import exempt_from_proxy
        from slime.observability.trace_file import TraceFiles

        self.log_dir = Path(run_dir) / "logs"
        redirect_output(self.log_dir, "rollout-manager")
        # For clients in user code and in agent programs, which do use the environment's proxy.
        os.environ.update(exempt_from_proxy(ray.util.get_node_ip_address()))
        self.garbage = GarbageCollection()
        self.run_dir = Path(run_dir)
        self.layout = layout
        self.data_source = load_function(args.data_source_path)(args)
        if args.num_rollout is None:
            per_epoch = max(len(self.data_source) // args.rollout_batch_size, 1)
            args = args.with_values(num_rollout=per_epoch * (args.num_epoch or 1))
        self.args = args  # what users' functions get; replaced while the run starts, never changed
        self.rollout_function = load_function(args.rollout_function_path)
        self.eval_function = load_function(args.eval_function_path or args.rollout_function_path)
        self.state = RolloutState(args, self.run_dir, self.data_source)
        self.traces = TraceFiles(self.run_dir, args.log_keep_last)
        self.pool: StandingPool | None = None  # of a fully asynchronous run
        self._fleet: EngineFleet | None = None
        self._monitor: HealthMonitor | None = None

    def try_folder(self, folder: str, token: str) -> Answer:
        """See :mod:`slime.checkpoint.shared_folder`."""
        from slime.checkpoint.shared_folder import answer

        return answer(folder, token, "rollout manager")

    def set_token_budgets(self, training: int, forward_only: int) -> None:
        """Pack by the measured budgets; called before the first rollout."""
        self.args = self.args.with_values(max_tokens_per_gpu=training, log_probs_max_tokens_per_gpu=forward_only)

    # --- engines -----------------------------------------------------------------------------

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

    def lose_engines(self, blamed: dict[str, str]) -> EngineStatus:
        """A call to the engines failed. Those that are blamed for it, and those that make no token any more, are
        lost. Returns URLs by state, as :meth:`begin_update`."""
        from slime.cluster.engine_actor import ASK_SECONDS
        from slime.cluster.health import unhealthy

        gone = self.monitor.processes.ended(ASK_SECONDS)
        lost = {**blamed, **gone}
        if not lost:  # torn engines make no token, but then there is blame
            lost = unhealthy(self.fleet.urls(), self.args.rollout_health_check_timeout)
        self.fleet.lose(lost)
        return self.fleet.status()

    def start_lost_engines(self) -> EngineStatus:
        """Start them again now, wait for them, and return URLs by state."""
        self.fleet.settled()  # one whose processes are still being ended would not be started
        self.fleet.restart_lost()
        self.fleet.settled()
        return self.fleet.status()

    def handles(self) -> list[EngineHandle]:
        from slime.engines.handle import EngineHandle

        return [EngineHandle(url) for url in self.fleet.urls()]

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

        _, failed = run(on_each(self.handles(), call, "release or resume its memory", CONTROL_DEADLINE_SECONDS))
        for error in failed.values():
            if not self.fleet.tolerant:
                raise error
        self.fleet.lose({url: str(error) for url, error in failed.items()})

    # --- the loop ----------------------------------------------------------------------------

    def num_rollout(self) -> int:
        """Rollouts of the run: ``--num-rollout``, or else those of ``--num-epoch`` epochs of the data source."""
        return int(self.args.num_rollout or 0)

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Generate one rollout, or take it from the snapshot that held it."""
        import ray

        from slime.cluster.manager_client import RolloutBatch
        from slime.data.convert import samples_to_train_data, split_train_data
        from slime.data.sample import flatten
        from slime.data.staleness import add_staleness
        from slime.observability.best_effort import take_warnings

        rollout = self.state.take_restored(rollout_id) or self._new_rollout(rollout_id)
        groups, metrics = rollout.groups, rollout.metrics
        texts = self._log(rollout_id, groups, metrics, rollout.seconds)
        if self.args.debug_rollout_only:
            return RolloutBatch([], metrics, texts, take_warnings())
        train_data = samples_to_train_data(self.args, groups)
        add_staleness(train_data, flatten(groups), rollout_id)
        parts = split_train_data(self.args, train_data, self.layout.dp, self.layout.schedule())
        if all("group_indices" in part for part in parts):
            self.state.ledger.left_out(rollout_id, {int(n) for part in parts for n in part["group_indices"]})
        for part in parts:
            part["rollout_id"] = rollout_id
        return RolloutBatch([ray.put(part) for part in parts], metrics, texts, take_warnings())

    def _new_rollout(self, rollout_id: int) -> Rollout:
        """Generate one, and cut the account there."""
        from slime.cluster.rollout_state import Rollout
        from slime.rollout.state import GenerateState

        start = time.perf_counter()
        GenerateState(self.args).observer = self.state.observe
        groups, metrics = self._rollout(rollout_id)
        metrics.update(self._fault_counts())
        rollout = Rollout(groups, metrics, time.perf_counter() - start)
        self.garbage.collect()

        async def complete() -> None:  # on the thread that the pool lives on
            self.state.complete(rollout_id, rollout)

        run(complete())
        return rollout

    def open_pool(self, first_step: int, last_step: int, held_step: int) -> bool:
        """An asynchronous run begins, with engines that hold the weights of ``held_step``: log its schedule. Returns
        whether the rollout function has a standing pool, which updates go through; if so, it is open."""
        from slime.rollout.state import GenerateState

        schedule = self.state.open_schedule(self.run_dir / "schedule.jsonl", held_step, first_step, last_step)
        GenerateState(self.args).schedule = schedule
        opener = getattr(self.rollout_function, "open_pool", None)
        if opener is None or self.args.load_debug_rollout_data:
            return False
        GenerateState(self.args).observer = self.state.observe
        ahead = len(self.state.restored)  # rollouts that a snapshot held
        self.pool = opener(self.args, self.data_source, first_step, last_step, ahead)
        return True

    def weights_are_of(self, step: int) -> None:
        """The engines of an asynchronous run hold the weights that ``step`` steps have trained."""
        run(self.state.schedule.reached(step))

    def await_recorded(self, rollout_id: int) -> None:
        """In a replay: return when the engines hold the weights with which this rollout began."""
        run(self.state.schedule.may_begin(rollout_id))

    def await_tokens(self) -> None:
        """In a replay: return when all recorded tokens of the weights that the engines hold are there.

        Raises:
            WaitExpired: they are not within ``--phase-timeout``.
        """
        from slime.cluster.polling import wait_for
        from slime.engines.http import request

        async def held() -> int:
            answers = [await request("GET", f"{url}/v1/loads", None, CONTROL_DEADLINE_SECONDS) for url in urls]
            return sum(int(rank.get("num_held_reqs") or 0) for answer in answers for rank in answer["loads"])

        urls, schedule = self.fleet.urls(), self.state.schedule
        what = "the recorded tokens before a weight update (--replay-schedule)"
        done = lambda: schedule.missing(run(held())) is None  # noqa: E731
        report = lambda: str(schedule.missing(run(held())))  # noqa: E731
        wait_for(what, done, self.args.phase_timeout, poll=0.02, report=report)

    def advance_pool(self, version: int, taken: bool, trained: bool) -> None:
        """How far training is: see :meth:`StandingPool.advance`."""
        assert self.pool is not None, "open_pool comes first"
        run(self.pool.advance(version, taken, trained))

    def drain_pool(self) -> None:
        """Let the pool's groups finish before an update: see :meth:`StandingPool.drain`."""
        assert self.pool is not None, "open_pool comes first"
        run(self.pool.drain())

    def _rollout(self, rollout_id: int) -> tuple[list[Any], dict[str, float]]:
        from slime.observability.debug_data import load_rollout, save_rollout
        from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn

        if self.args.load_debug_rollout_data:
            args = self.args
            assert args.load_debug_rollout_data is not None
            amount = args.load_debug_rollout_data_subsample
            return load_rollout(args.load_debug_rollout_data, rollout_id, amount), {}
        output = call_rollout_fn(self.rollout_function, self.args, rollout_id, self.data_source, evaluation=False)
        assert isinstance(output, RolloutFnTrainOutput)
        if self.args.save_debug_rollout_data:
            save_rollout(self.args, rollout_id, output.samples)
        return list(output.samples), dict(output.metrics or {})

    def _fault_counts(self) -> dict[str, float]:
        """Requests sent again, engines lost and started again, since the rollout before."""
        from slime.engines.http import take_retries

        return {"rollout/http_retry_count": float(take_retries()), **(self.fleet.counts() if self._fleet else {})}

    def _log(self, rollout_id: int, groups: list[Any], metrics: dict[str, float], seconds: float) -> list[str]:
        """Add what the samples say to ``metrics``, keep the texts, and return a few to show."""
        from slime.config.hooks import load_function
        from slime.data.sample import flatten
        from slime.data.staleness import staleness_metrics
        from slime.observability.samples import KeptTexts, preview, write_samples
        from slime.rollout.metrics import rollout_metrics

        samples = flatten(groups)
        write_samples(self.run_dir, rollout_id, samples, kept=KeptTexts.from_args(self.args))
        self.traces.write_samples(rollout_id, samples)
        hook = self.args.custom_rollout_log_function_path
        if not (hook and load_function(hook)(rollout_id, self.args, samples, metrics, seconds)):
            metrics.update(rollout_metrics(self.args, samples, seconds))
        metrics.update(staleness_metrics(samples, rollout_id))
        return preview(samples)

    def add_phases(self, rollout_id: int, phases: Sequence[dict[str, Any]]) -> None:
        """The driver's phases up to the end of a step, for the trace of its rollout."""
        self.traces.add_phases(rollout_id, phases)

    def eval(self, rollout_id: int) -> dict[str, float]:
        """Evaluate all data sets with the weights that the engines hold now."""
        from slime.config.hooks import load_function
        from slime.observability.debug_data import save_rollout
        from slime.observability.evaluations import write_evaluation
        from slime.observability.samples import KeptTexts, write_samples
        from slime.rollout.base_types import RolloutFnEvalOutput, call_rollout_fn
        from slime.rollout.metrics import eval_metrics

        start = time.perf_counter()
        output = call_rollout_fn(self.eval_function, self.args, rollout_id, self.data_source, evaluation=True)
        assert isinstance(output, RolloutFnEvalOutput)
        metrics = dict(output.metrics or {})
        for name, data in output.data.items():
            samples = data.get("samples") or []
            write_samples(self.run_dir, rollout_id, samples, f"eval-{name}", KeptTexts.from_args(self.args))
        if self.args.save_debug_rollout_data:
            save_rollout(self.args, f"eval_{rollout_id}", [data.get("samples") or [] for data in output.data.values()])
        hook = self.args.custom_eval_rollout_log_function_path
        if not (hook and load_function(hook)(rollout_id, self.args, output.data, metrics)):
            metrics.update(eval_metrics(self.args, output.data))
        write_evaluation(self.run_dir, rollout_id, output.data, metrics)
        metrics["perf/eval_time"] = time.perf_counter() - start
        return metrics

    # --- state -------------------------------------------------------------------------------

    def save_state(self, rollout_id: int, directory: str) -> None:
        """Write data source, account and rollouts generated ahead below ``directory``; step ``rollout_id`` is over."""
        self.state.save(rollout_id, Path(directory))

    def load_state(self, rollout_id: int, directory: str, attempt: int) -> None:
        self.state.load(rollout_id, Path(directory), attempt)

    def trained(self, rollout_id: int) -> None:
        """Step ``rollout_id`` is over."""
        self.state.trained(rollout_id)

    def close_account(self, trained: int) -> dict[str, int]:
        """The run ends after step ``trained``; returns the number of groups by state. Raises ``LedgerError``."""
        cut = self.state.close_account(trained)
        return {**cut["counts"], "ahead of training": len(cut["ahead"]), "open": len(cut["open"])}

    def status(self) -> dict[str, Any]:
        """What is under way; answers while :meth:`generate` runs."""
        from slime.observability import progress

        return progress.latest()

    def engine_report(self) -> str:
        """One line per engine, with the last log lines of those that died."""
        return self.fleet.report() if self._fleet is not None else "no engine was started"

    def end_engines(self, at_once: bool = True) -> None:
        """Stop router and engines; returns when their processes are gone. What they generate fails."""
        if self._monitor is not None:
            self._monitor.stop()
        if self._fleet is not None:
            self._fleet.stop(at_once)

    def shutdown(self) -> list[str]:
        """Stop router and engines; returns when their processes are gone, with the last warnings of this process."""
        from slime.observability.best_effort import take_warnings

        self.end_engines(at_once=False)
        self.state.close()
        return take_warnings()


async def flush_when_idle(engine: EngineHandle, deadline: float = IDLE_DEADLINE_SECONDS) -> None:
    """Flush an engine's cache once nothing runs or waits on it.

    A refusal is tried again: requests that are just ending are in no count.

    Raises:
        EngineError: still not idle at the deadline (seconds).
    """
    import asyncio

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
