"""The actor between data and training: it owns the data source and the engines, and runs the
rollout functions.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

from slime.checkpoint.files import Answer, answer
from slime.cluster.actors import Ref, door
from slime.cluster.engine_calls import (
    CONTROL_DEADLINE_SECONDS,
    Workers,
    call_each,
    fleet_of,
    flush_when_idle,
    watch_engines,
)
from slime.cluster.generation import GarbageCollection, Generation
from slime.cluster.ray_wait import wait_for
from slime.cluster.rollout_state import Rollout, RolloutState
from slime.config.hooks import load_function
from slime.config.machine import raise_file_limit
from slime.data.convert import parts_of_ranks
from slime.data.sample import Group, Sample, flatten
from slime.data.schedule import ready
from slime.data.source import DataSource, rollouts_of_epochs
from slime.data.staleness import staleness_metrics
from slime.data.tokenizers import preload_tokenizer
from slime.engines.background import run
from slime.engines.http import init_http_client, request, take_retries
from slime.engines.process import exempt_from_proxy
from slime.observability import progress
from slime.observability.debug_data import load_rollout, save_rollout
from slime.observability.files import take_warnings, untaken_warnings, warn
from slime.observability.logging_utils import logged_into
from slime.observability.metrics import write_evaluation
from slime.observability.samples import KeptTexts, preview, write_samples
from slime.observability.trace_file import TraceFiles
from slime.registry import find
from slime.rollout.abort import abort
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.evaluate import NotCompleted, Prompt, complete
from slime.rollout.group import index_of
from slime.rollout.metrics import all_failed, eval_metrics, is_untrainable, rollout_metrics
from slime.rollout.state import GenerateState

if TYPE_CHECKING:
    from pathlib import Path

    from slime.cluster.placement import Placement
    from slime.config.args import Args
    from slime.config.layout import ParallelLayout
    from slime.data.fields import Wire
    from slime.engines.keys import RunKeys
    from slime.rollout.fully_async_rollout import StandingPool
    from slime.rollout.weight_timeline import WeightTimeline

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutBatch:
    """One generated rollout as the driver gets it; the samples themselves stay where the actors
    keep objects.
    """

    refs: list[Ref[Wire]]
    """The training data, one object per data-parallel rank; empty with ``--debug-rollout-only``."""
    metrics: dict[str, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    """A few samples to show."""
    warnings: list[str] = field(default_factory=list)
    """Warnings of the rollout manager's process since the last rollout."""
    critic_refs: list[Ref[Wire]] = field(default_factory=list)
    """``refs`` for a critic whose ranks divide it otherwise; empty if they do not."""


class RolloutManager:
    """One per run. Generation runs on one thread, while :meth:`status` and others answer on further
    threads.

    Args:
        layouts: That of the actor, and of a critic that has another one.
        in_program: Whether the run belongs to a program, which may save at any time.

    Attributes:
        args: Passed to users' functions. Replaced once the addresses of the engines are known, but
            never modified.
        fleet: The engines; none in a run that only trains.
    """

    def __init__(
        self,
        args: Args,
        run_dir: Path,
        layouts: Sequence[ParallelLayout],
        placement: Placement,
        keys: RunKeys,
        in_program: bool = False,
    ) -> None:
        self.run_dir = run_dir
        door().log_to(self.run_dir / "logs", "rollout-manager")
        # For HTTP clients in user code and in agent programs, which use the proxy that the
        # environment names.
        os.environ.update(exempt_from_proxy(door().address()))
        self.garbage = GarbageCollection()
        self.layouts = layouts
        # First, because the engines import and load their models meanwhile. If anything else
        # fails, nobody else could end them.
        self.fleet = fleet_of(args, placement, self.run_dir / "logs", keys)
        with contextlib.ExitStack() as undo:
            undo.callback(self.fleet.stop, now=True)
            self.fleet.begin()
            self.data_source: DataSource = load_function(args.data_source_path)(args)
            if args.num_rollout is None:
                # Only the data source knows how many prompts an epoch has.
                args = args.with_values(
                    num_rollout=rollouts_of_epochs(
                        len(self.data_source), args.num_epoch, args.rollout_batch_size
                    )
                )
            self.args = args
            self.workers: Workers | None = None
            self.rollout_function = load_function(args.rollout_function_path)
            self.eval_function = load_function(
                args.eval_function_path or args.rollout_function_path
            )
            self.in_program = in_program
            self.state = RolloutState(args, self.run_dir, self.data_source, in_program)
            self.traces = TraceFiles(self.run_dir, args.log_keep_last)
            self.pool: StandingPool | None = None  # of a fully asynchronous run
            self.pool_since = 0.0  # when its last rollout was taken
            self.generation = Generation()
            undo.pop_all()

    def try_folder(self, folder: str, token: str) -> Answer:
        """See :mod:`slime.checkpoint.files`."""
        return answer(folder, token, "rollout manager")

    def set_token_budgets(self, budgets: Mapping[str, int]) -> None:
        """Set the measured budgets, by which samples are packed; called before the first
        rollout.
        """
        self.args = self.args.with_values(**budgets)

    # --- the engines ---------------------------------------------------------------------------

    def start_engines(self) -> list[str]:
        """Start all engines at the same time, then the router and the rollout workers if there are
        any; returns the engine URLs.
        """
        fleet = self.fleet
        raise_file_limit()  # The router inherits the limit, because it is a child of this process.
        progress.report("start engines", 0, fleet.num_own)
        # While the servers start, since the first request would wait for it. Not on another thread:
        # imports of transformers on two threads at once can fail.
        preload_tokenizer(self.args.hf_checkpoint, self.args.trust_remote_code)
        fleet.start(partial(progress.report, "start engines"))
        self.args = self.args.with_values(**fleet.addresses)
        init_http_client(self.args)
        watch_engines(fleet)
        if fleet.settings.workers:
            self.workers = find("generator", "workers")(self.args, fleet)
        return fleet.status().serving

    def on_engines(self, call: Callable[..., T], *arguments: object) -> T:
        """Call a function with the fleet, also while :meth:`generate` runs."""
        return call(self.fleet, *arguments)

    def end_engines(self, now: bool = True) -> None:
        """Stop rollout workers, router and engines; returns when their processes have ended.

        Groups in progress fail.
        """
        # first: they would start requests again, and report engines as faulty
        if self.workers is not None:
            self.workers.stop()
        self.fleet.stop(now)

    # --- the loop ----------------------------------------------------------------------------

    def num_rollout(self) -> int:
        """Number of rollouts of the run: ``--num-rollout``, or those in ``--num-epoch`` epochs of
        the data source.
        """
        return int(self.args.num_rollout or 0)

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Generate one rollout, or take it from the snapshot from which the run resumed."""
        with self.generation.call():
            rollout = self.state.restored.pop(rollout_id, None) or self._new_rollout(rollout_id)
            metrics = rollout.metrics
            texts = self._log(rollout_id, rollout.groups, metrics, rollout.seconds)
            if self.args.debug_rollout_only:
                return RolloutBatch([], metrics, texts, take_warnings())
            stored: list[Ref[Wire]] = []
            used: set[int] = set()
            numbered = True
            for part in parts_of_ranks(
                self.args,
                rollout.groups,
                rollout_id,
                *self.layouts,
                finished=self.state.finished_groups(rollout_id),
            ):
                stored.append(door().put(part))
                used.update(map(int, part.get("group_indices", ())))
                numbered = numbered and "group_indices" in part
            # Only groups that fill whole steps are in the parts. The ledger must not count the others
            # as trained.
            if numbered:
                self.state.ledger.left_out(rollout_id, used)
            of_actor = self.layouts[0].dp
            return RolloutBatch(
                stored[:of_actor], metrics, texts, take_warnings(), stored[of_actor:]
            )

    def take_part(self, rollout_id: int, number: int) -> list[Ref[Wire]]:
        """Part ``number`` of a rollout that is being generated (``--train-during-rollout``), one
        object per data-parallel rank; none if groups of it are not finished, or if it is the last
        one.
        """
        layout = self.layouts[0]
        part = ready(self.state.finished_groups(rollout_id), self.args, layout.dp, number)
        # In the order that they will have in the whole rollout, on which the packs depend.
        part.sort(key=index_of)
        with self.generation.call():
            parts = parts_of_ranks(self.args, part, rollout_id, layout) if part else ()
            return [door().put(one) for one in parts]

    def _new_rollout(self, rollout_id: int) -> Rollout:
        """Call the rollout function, and record in ledger and state that this rollout is
        complete.
        """
        # A standing pool has been generating since its last rollout.
        start = self.pool_since if self.pool is not None else time.perf_counter()
        args = self.args
        self.state.begin(rollout_id)
        self._generate_state().observer = self.state.observe
        if args.load_debug_rollout_data:
            output = RolloutFnTrainOutput(
                load_rollout(
                    args.load_debug_rollout_data,
                    rollout_id,
                    args.load_debug_rollout_data_subsample,
                )
            )
        else:
            returned = call_rollout_fn(
                self.rollout_function, args, rollout_id, self.data_source, evaluation=False
            )
            assert isinstance(returned, RolloutFnTrainOutput)
            output = returned
            if args.save_debug_rollout_data:
                save_rollout(rollout_id, output.samples, debug=args, model=args)
        # what was retried, lost and restarted since the previous rollout
        metrics = {**(output.metrics or {}), **self.fleet.counts()}
        metrics["rollout/http_retry_count"] = float(take_retries())
        if self.workers is not None:
            metrics["rollout/worker_restart_count"] = self.workers.restarts()
        self.pool_since = time.perf_counter()
        rollout = Rollout(list(output.samples), metrics, self.pool_since - start)
        self.garbage.collect()  # between two rollouts, where no generation of this one waits for it

        # runs on the pool's event loop, so the pool cannot change meanwhile
        async def complete() -> None:
            self.state.complete(rollout_id, rollout)

        run(complete())
        return rollout

    def _generate_state(self) -> GenerateState:
        """The state that the rollout functions share, with the rollout workers, which ``args`` do
        not hold.
        """
        state = GenerateState(self.args)
        state.generator = self.workers
        return state

    def open_pool(self, first_step: int, last_step: int, held_step: int) -> bool:
        """Open the standing pool of an asynchronous run, if its rollout function has one, and log
        its schedule.

        Args:
            first_step, last_step: The run trains rollouts ``first_step`` to ``last_step - 1``.
            held_step: The number of steps that have trained the engines' weights.

        Returns:
            Whether there is a standing pool, whose groups continue through weight updates.
        """
        shared = self._generate_state()
        shared.schedule = self.state.open_schedule(
            self.run_dir / "schedule.jsonl", held_step, first_step, last_step
        )
        opener = getattr(self.rollout_function, "open_pool", None)
        if opener is None or self.args.load_debug_rollout_data:
            return False
        shared.observer = self.state.observe
        self.pool = opener(
            self.args,
            self.data_source,
            first_step,
            last_step,
            len(self.state.restored),  # the number of rollouts that need not be generated
            held_step,
        )
        self.pool_since = time.perf_counter()
        return True

    @property
    def schedule(self) -> WeightTimeline:
        assert self.state.schedule is not None, "open_pool comes first"
        return self.state.schedule

    def await_recorded(self, rollout_id: int) -> None:
        """In a replay, wait until the engines hold the weights with which this rollout began in the
        recording.
        """
        run(self.schedule.may_begin(rollout_id))

    def await_tokens(self) -> None:
        """In a replay, wait until all tokens have been generated that were recorded with the
        engines' current weights.

        Raises:
            WaitExpired: Some are still missing after ``--phase-timeout`` seconds.
        """

        async def missing() -> str | None:
            answers = [
                await request("GET", f"{url}/v1/loads", None, CONTROL_DEADLINE_SECONDS)
                for url in self.fleet.urls()
            ]
            return self.schedule.missing(
                sum(
                    int(rank.get("num_held_reqs") or 0)
                    for answer in answers
                    for rank in answer["loads"]
                )
            )

        wait_for(
            "the recorded tokens before a weight update (--replay-schedule)",
            lambda: not run(missing()),
            self.args.phase_timeout,
            poll=0.02,
            report=lambda: str(run(missing())),
        )

    def advance(self, step: int, taken: bool, trained: bool) -> None:
        """Note that the engines of an asynchronous run hold the weights that ``step`` steps have
        trained, and tell the pool, if there is one, how far training is; see
        :meth:`StandingPool.advance`.
        """
        run(self.schedule.reached(step))
        if self.pool is not None:
            run(self.pool.advance(step, taken, trained))

    def drain_pool(self) -> None:
        """Wait until the pool's groups have finished, before an update; see
        :meth:`StandingPool.drain`.
        """
        assert self.pool is not None, "open_pool comes first"
        run(self.pool.drain())

    def _log(
        self, rollout_id: int, groups: list[Group], metrics: dict[str, float], seconds: float
    ) -> list[str]:
        """Add metrics of the samples to ``metrics``, write the sample texts, and return a few of
        them to show.
        """
        # The samples with their texts, then their metrics, which a function of the user may log
        # instead.
        args = self.args
        samples = flatten(groups)
        write_samples(self.run_dir, rollout_id, samples, kept=KeptTexts.of(args))
        self.traces.write_samples(rollout_id, samples)
        hook = args.custom_rollout_log_function_path
        with logged_into(metrics):
            handled = hook and load_function(hook)(rollout_id, args, samples, metrics, seconds)
        if not handled:
            metrics.update(
                rollout_metrics(args, args.reward_key, samples, seconds, args.rollout_num_gpus)
            )
        metrics.update(staleness_metrics(samples, rollout_id))
        if samples:
            metrics["rollout/failed_ratio"] = fmean(map(is_untrainable, samples))
        if failure := all_failed(samples):
            warn(f"rollout {rollout_id}: {failure}")
        return preview(samples)

    def add_phases(self, rollout_id: int, phases: Sequence[progress.Span]) -> None:
        """Add the phases of driver and ranks up to the end of a step, and the engines' load, to its
        rollout's trace.
        """
        loads = self.fleet.loads
        self.traces.add_phases(rollout_id, phases, loads.between if loads is not None else None)

    def eval(self, rollout_id: int) -> dict[str, float]:
        """Evaluate all data sets with the weights that the engines hold now."""
        with self.generation.call():
            start = time.perf_counter()
            args = self.args
            self._generate_state()
            # The responses of each evaluation set, and what is kept of them.
            output = call_rollout_fn(
                self.eval_function, args, rollout_id, self.data_source, evaluation=True
            )
            assert isinstance(output, RolloutFnEvalOutput)
            metrics = dict(output.metrics or {})
            data = output.data
            sets = {name: one.get("samples") or [] for name, one in data.items()}
            for name, samples in sets.items():
                write_samples(self.run_dir, rollout_id, samples, f"eval-{name}", KeptTexts.of(args))
            if args.save_debug_rollout_data:
                save_rollout(f"eval_{rollout_id}", [*sets.values()], debug=args, model=args)
            # The metrics: the user's function may log its own in place of the built-in ones.
            hook = args.custom_eval_rollout_log_function_path
            with logged_into(metrics):
                handled = hook and load_function(hook)(rollout_id, args, data, metrics)
            if not handled:
                metrics.update(eval_metrics(data, args.log_reward_category, args.log_passrate))
            write_evaluation(self.run_dir, rollout_id, data, metrics)
            metrics["perf/eval_time"] = time.perf_counter() - start
            return metrics

    def complete(
        self,
        prompts: Sequence[Prompt],
        n: int,
        changes: Mapping[str, object],
        first: int = 0,
        purpose: str = "complete",
    ) -> list[list[Sample]] | str:
        """Generate responses outside of any rollout; see :func:`slime.rollout.evaluate.complete`.

        Returns:
            The samples of each prompt; or the reason for which a prompt or a parameter was refused.
            An exception would reach the driver as one of Ray, which ends the run.
        """
        try:
            return run(complete(GenerateState(self.args), prompts, n, changes, first, purpose))
        except NotCompleted as error:
            return str(error)

    # --- state -------------------------------------------------------------------------------

    def save_state(self, rollout_id: int, directory: Path) -> int:
        """Write data source, ledger and rollouts generated ahead below ``directory``, after step
        ``rollout_id``.

        Returns:
            The number of these rollouts.
        """
        return self.state.save(rollout_id, directory)

    def load_state(self, rollout_id: int, directory: Path, attempt: int) -> None:
        self.state.load(rollout_id, directory, attempt)

    def rewind(self) -> None:
        """End all generation, and begin anew with data source, ledger and schedule, while the
        engines stay.

        :meth:`load_state` comes next, as after the start of a resumed run.

        Raises:
            WaitExpired: A rollout or an evaluation in progress did not end.
            EngineError: An engine did not become idle, and the run is without
                ``--use-fault-tolerance``.
        """
        self.generation.end()
        if self.pool is not None:
            run(self.pool.close())
            self.pool = None
        # The engines may still work on requests whose senders have ended, and keep KV of weights
        # that are undone.
        args = self.args
        shared = GenerateState(args)
        run(abort(shared))
        call_each(self.fleet, flush_when_idle)
        self.state.close()
        self.data_source = load_function(args.data_source_path)(args)
        self.state = RolloutState(args, self.run_dir, self.data_source, self.in_program)
        shared.begin_anew()
        self.generation.begin()

    def trained(self, rollout_id: int) -> None:
        """Note that step ``rollout_id`` is complete."""
        self.state.trained(rollout_id)

    def close_account(self, trained: int) -> dict[str, int]:
        """Close the ledger after the last step, ``trained``; returns the number of groups by state.

        Raises:
            LedgerError: A requested group is missing, or was counted more than once.
        """
        cut = self.state.close_account(trained)
        return {**cut["counts"], "ahead of training": len(cut["ahead"]), "open": len(cut["open"])}

    def status(self) -> progress.Progress:
        """What this process is doing; answers while :meth:`generate` runs."""
        return {**progress.latest(), "warnings": untaken_warnings()}

    def shutdown(self) -> list[str]:
        """Stop router and engines; returns the last warnings of this process when their processes
        have ended.
        """
        self.end_engines(now=False)
        self.state.close()
        return take_warnings()
