"""The Ray actor between data and training: it has the data source and the engines, and runs the rollout functions."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cluster.engine_manager import CONTROL_DEADLINE_SECONDS, EngineManager
from slime.cluster.garbage import GarbageCollection
from slime.config.hooks import load_function
from slime.data.sample import flatten
from slime.engines.background import run
from slime.observability.debug_data import load_rollout, save_rollout
from slime.observability.samples import KeptTexts, preview, write_samples
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.metrics import eval_metrics, rollout_metrics
from slime.rollout.state import GenerateState

if TYPE_CHECKING:
    from slime.checkpoint.shared_folder import Answer
    from slime.cluster.manager_client import RolloutBatch
    from slime.cluster.rollout_state import Rollout
    from slime.config.args import Args
    from slime.config.layout import ParallelLayout
    from slime.data.sample import Group
    from slime.data.source import DataSource
    from slime.observability.progress import Progress
    from slime.observability.timers import Span
    from slime.rollout.fully_async_rollout import StandingPool
    from slime.rollout.weight_timeline import WeightTimeline


class RolloutManager(EngineManager):
    """One per run. Generation runs on one thread; :meth:`status` answers meanwhile on another."""

    def __init__(self, args: Args, run_dir: str, layout: ParallelLayout) -> None:
        import ray

        from slime.cluster.logs import redirect_output
        from slime.cluster.rollout_state import RolloutState
        from slime.engines.process import exempt_from_proxy
        from slime.observability.trace_file import TraceFiles

        self.run_dir = Path(run_dir)
        redirect_output(self.run_dir / "logs", "rollout-manager")
        # For clients in user code and in agent programs, which do use the environment's proxy.
        os.environ.update(exempt_from_proxy(ray.util.get_node_ip_address()))
        self.garbage = GarbageCollection()
        self.layout = layout
        self.data_source: DataSource = load_function(args.data_source_path)(args)
        if args.num_rollout is None:
            per_epoch = max(len(self.data_source) // args.rollout_batch_size, 1)
            args = args.with_values(num_rollout=per_epoch * (args.num_epoch or 1))
        super().__init__(args, self.run_dir / "logs")
        self.rollout_function = load_function(args.rollout_function_path)
        self.eval_function = load_function(args.eval_function_path or args.rollout_function_path)
        self.state = RolloutState(args, self.run_dir, self.data_source)
        self.traces = TraceFiles(self.run_dir, args.log_keep_last)
        self.pool: StandingPool | None = None  # of a fully asynchronous run

    def try_folder(self, folder: str, token: str) -> Answer:
        """See :mod:`slime.checkpoint.shared_folder`."""
        from slime.checkpoint.shared_folder import answer

        return answer(folder, token, "rollout manager")

    def set_token_budgets(self, training: int, forward_only: int) -> None:
        """Pack by the measured budgets; called before the first rollout."""
        self.args = self.args.with_values(max_tokens_per_gpu=training, log_probs_max_tokens_per_gpu=forward_only)

    # --- the loop ----------------------------------------------------------------------------

    def num_rollout(self) -> int:
        """Rollouts of the run: ``--num-rollout``, or else those of ``--num-epoch`` epochs of the data source."""
        return int(self.args.num_rollout or 0)

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Generate one rollout, or take it from the snapshot that held it."""
        import ray

        from slime.cluster.manager_client import RolloutBatch
        from slime.data.convert import samples_to_train_data, split_train_data
        from slime.data.staleness import add_staleness
        from slime.observability.best_effort import take_warnings

        rollout = self.state.restored.pop(rollout_id, None) or self._new_rollout(rollout_id)
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
        """Call the rollout function, and cut the account there."""
        from slime.cluster.rollout_state import Rollout

        start = time.perf_counter()
        args = self.args
        GenerateState(args).observer = self.state.observe
        if args.load_debug_rollout_data:
            subsample = args.load_debug_rollout_data_subsample
            output = RolloutFnTrainOutput(load_rollout(args.load_debug_rollout_data, rollout_id, subsample))
        else:
            returned = call_rollout_fn(self.rollout_function, args, rollout_id, self.data_source, evaluation=False)
            assert isinstance(returned, RolloutFnTrainOutput)
            output = returned
            if args.save_debug_rollout_data:
                save_rollout(args, rollout_id, output.samples)
        metrics = {**(output.metrics or {}), **self.fault_counts()}
        rollout = Rollout(list(output.samples), metrics, time.perf_counter() - start)
        self.garbage.collect()

        async def complete() -> None:  # on the thread that the pool lives on
            self.state.complete(rollout_id, rollout)

        run(complete())
        return rollout

    def open_pool(self, first_step: int, last_step: int, held_step: int) -> bool:
        """An asynchronous run begins, with engines that hold the weights of ``held_step``: log its schedule. Returns
        whether the rollout function has a standing pool, which updates go through; if so, it is open."""

        schedule = self.state.open_schedule(self.run_dir / "schedule.jsonl", held_step, first_step, last_step)
        GenerateState(self.args).schedule = schedule
        opener = getattr(self.rollout_function, "open_pool", None)
        if opener is None or self.args.load_debug_rollout_data:
            return False
        GenerateState(self.args).observer = self.state.observe
        ahead = len(self.state.restored)  # rollouts that a snapshot held
        self.pool = opener(self.args, self.data_source, first_step, last_step, ahead)
        return True

    @property
    def schedule(self) -> WeightTimeline:
        assert self.state.schedule is not None, "open_pool comes first"
        return self.state.schedule

    def weights_are_of(self, step: int) -> None:
        """The engines of an asynchronous run hold the weights that ``step`` steps have trained."""
        run(self.schedule.reached(step))

    def await_recorded(self, rollout_id: int) -> None:
        """In a replay: return when the engines hold the weights with which this rollout began."""
        run(self.schedule.may_begin(rollout_id))

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

        urls, schedule = self.fleet.urls(), self.schedule
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

    def _log(self, rollout_id: int, groups: list[Group], metrics: dict[str, float], seconds: float) -> list[str]:
        """Add what the samples say to ``metrics``, keep the texts, and return a few to show."""
        from slime.data.staleness import staleness_metrics

        samples = flatten(groups)
        write_samples(self.run_dir, rollout_id, samples, kept=KeptTexts.from_args(self.args))
        self.traces.write_samples(rollout_id, samples)
        hook = self.args.custom_rollout_log_function_path
        if not (hook and load_function(hook)(rollout_id, self.args, samples, metrics, seconds)):
            metrics.update(rollout_metrics(self.args, samples, seconds))
        metrics.update(staleness_metrics(samples, rollout_id))
        return preview(samples)

    def add_phases(self, rollout_id: int, phases: Sequence[Span]) -> None:
        """The driver's phases up to the end of a step, for the trace of its rollout."""
        self.traces.add_phases(rollout_id, phases)

    def eval(self, rollout_id: int) -> dict[str, float]:
        """Evaluate all data sets with the weights that the engines hold now."""
        from slime.observability.evaluations import write_evaluation

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

    def status(self) -> Progress:
        """What is under way; answers while :meth:`generate` runs."""
        from slime.observability import progress

        return progress.latest()

    def shutdown(self) -> list[str]:
        """Stop router and engines; returns when their processes are gone, with the last warnings of this process."""
        from slime.observability.best_effort import take_warnings

        self.end_engines(at_once=False)
        self.state.close()
        return take_warnings()
