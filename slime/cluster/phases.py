"""The phases of one iteration, as the loops in ``train.py`` and ``train_async.py`` call them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from slime.backends.lr_schedule import zero_lr_warning
from slime.cluster.engine_pool import EnginePool
from slime.cluster.prefetch import Prefetcher
from slime.cluster.rollout_manager import RolloutBatch, RolloutManager
from slime.observability.run_state import SentWeights, append_weights, digest_of_digests
from slime.weights.audit import gap_alarm

if TYPE_CHECKING:
    from slime.cluster.actors import Ref
    from slime.cluster.ray_wait import ManagerClient
    from slime.cluster.snapshots import Snapshots
    from slime.cluster.stop_signals import StopSignals
    from slime.cluster.trainer import Trainer
    from slime.config.args import Args
    from slime.observability.display import Display, Phase
    from slime.observability.metrics import MetricsLogger
    from slime.observability.progress import Progress, Span
    from slime.weights.update import UpdateReport


@dataclass
class Run:
    """A run that has been started. Every method waits until its phase is complete.

    Each phase is shown while it runs, fails after ``--phase-timeout`` seconds, and adds its
    duration to the metrics of the step.

    Attributes:
        first_rollout, num_rollout: The loop trains rollouts ``first_rollout`` to ``num_rollout -
            1``.
        completed: Whether the ledger is closed and the summary was printed.
        asked: The rollouts that were requested and not waited for to the end, by their ids.
        evaluation: The evaluation in progress: the number of rollouts that had trained its weights,
            and the reference to its result.
    """

    args: Args
    first_rollout: int
    num_rollout: int
    manager: ManagerClient
    trainer: Trainer
    pool: EnginePool
    snapshots: Snapshots
    log: StepLog
    stop: StopSignals
    completed: bool = False
    asked: dict[int, Ref[RolloutBatch]] = field(default_factory=dict)
    evaluation: tuple[int, Ref[dict[str, float]]] | None = None

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Generate samples with rewards, split over the data-parallel ranks.

        If a signal ends the wait, the engines continue, and the next call waits for the same
        rollout.
        """
        asked = self.asked
        with self.log.phase("rollout"), self.stop.interruptible():
            if rollout_id not in asked:
                asked[rollout_id] = self.manager.start(RolloutManager.generate, rollout_id)
            # Until its next step, the trainer keeps its weights, so engines that were restarted can
            # get them during this wait.
            batch = self.manager.wait(
                asked[rollout_id],
                f"rollout {rollout_id} to be generated",
                meanwhile=partial(self._during_rollout, rollout_id),
            )
            del asked[rollout_id]
        self.log.add_rollout(batch)
        return batch

    def _during_rollout(self, rollout_id: int) -> None:
        self.pool.sync_recovered_engines()
        if self.args.train_during_rollout == 1 or self.trainer.actor is None:
            return
        while True:
            refs = self.manager.call(
                f"a part of rollout {rollout_id}",
                RolloutManager.take_part,
                rollout_id,
                len(self.trainer.parts),
            )
            if not refs:
                return
            self.trainer.train_early_part(refs)

    def prefetch(self) -> Prefetcher:
        """Generate all rollouts of the asynchronous loop on a separate thread."""
        return Prefetcher(self)

    def offload_engines(self) -> None:
        """In a colocated run, move the accelerator memory from the engines to the trainer."""
        self.pool.offload()

    def train(self, rollout_id: int, batch: RolloutBatch) -> None:
        """Train critic and actor on a rollout; does nothing with ``--debug-rollout-only``."""
        if self.trainer.actor is None:
            return
        log = self.log
        args = self.args
        with log.phase("train"):
            self.trainer.train(rollout_id, batch.refs, batch.critic_refs)
            dtypes = args.train_dtype, args.rollout_quantization or args.rollout_dtype
            if alarm := gap_alarm(log.pending, args.logprob_gap_threshold, dtypes):
                log.note(alarm)
            warms_up = bool(
                args.lr_warmup_iters or args.lr_warmup_fraction or args.critic_lr_warmup_iters
            )
            if warning := zero_lr_warning(log.pending, rollout_id, warms_up):
                log.warn([warning])
        # The manager keeps the state of each rollout until it is trained, for snapshots; now it can
        # drop this one.
        self.manager.call(
            "the rollout manager to note that a step is trained", RolloutManager.trained, rollout_id
        )
        self.trainer.log_memory("train")

    def save(self, rollout_id: int) -> None:
        """Write a snapshot; see :meth:`Snapshots.save`."""
        self.snapshots.save(rollout_id)

    def update_weights(self) -> None:
        """Send the actor's weights to every engine; see :meth:`EnginePool.update_weights`."""
        self.pool.update_weights()

    def evaluate(self, step: int) -> None:
        """Run all evaluation sets with the engines' weights, which ``step`` rollouts have
        trained.
        """
        self.start_evaluation(step)
        self.finish_evaluation()

    def start_evaluation(self, step: int) -> None:
        """Start an evaluation. Training may continue, but the engines' weights must not change
        until :meth:`finish_evaluation`.
        """
        self.evaluation = step, self.manager.start(RolloutManager.eval, step)

    def finish_evaluation(self) -> bool:
        """Wait for the evaluation in progress, and log its metrics; returns whether there was
        one.
        """
        if self.evaluation is None:
            return False
        step, evaluation = self.evaluation
        with self.log.phase("eval"), self.stop.interruptible():
            metrics = self.manager.wait(
                evaluation,
                "the evaluation",
                # A restarted engine must not bring newer weights into the middle of it.
                meanwhile=partial(self.pool.sync_recovered_engines, keep_version=True),
            )
        self.evaluation = None
        self.log.log_evaluation(step, metrics)
        return True

    def end_step(self, rollout_id: int) -> None:
        """Log the step's metrics and begin the next step."""
        self.snapshots.commit_if_written()
        of_ranks = [span for group in self.trainer.groups for span in group.pop_spans()]
        self.manager.call(
            "the trace of a rollout to be completed",
            RolloutManager.add_phases,
            rollout_id,
            self.log.end_step(rollout_id, self.num_rollout, of_ranks),
        )

    # --- what is due when --------------------------------------------------------------------

    def is_due(self, rollout_id: int, interval: int | None) -> bool:
        """Whether an action is due after this rollout: every ``interval`` rollouts and after the
        last one.

        Without an interval, it is never due.
        """
        return interval is not None and (
            (rollout_id + 1) % interval == 0 or rollout_id + 1 == self.num_rollout
        )

    def evaluates_at_start(self) -> bool:
        """Whether to evaluate before the first step.

        A resumed run does so if an evaluation was due after the last step of its snapshot: the
        snapshot was written before that evaluation.
        """
        if self.first_rollout == 0:
            return bool(self.args.eval_interval) and not self.args.skip_eval_before_train
        return self.is_due(self.first_rollout - 1, self.args.eval_interval)


MOST_SPANS = 500
"""How many of the newest timed phases are kept for the trace of a rollout."""
MOST_RANK_SPANS = 5000
"""The same of the training ranks: some steps of a thousand ranks."""


@dataclass
class StepLog:
    """Collects the metrics of the current step and times its phases; one per run, in the driver.

    Attributes:
        pending: Metrics of the current step, by name.
        last_step, last_evaluation: Metrics of the last complete step and of the last evaluation.
        all_failed: Of each rollout, whether no sample can be trained.
        left_out: Metrics that mean nothing in this run.
    """

    display: Display
    left_out: Sequence[str] = ()
    pending: dict[str, float] = field(default_factory=dict)
    last_step: dict[str, float] = field(default_factory=dict)
    last_evaluation: dict[str, float] = field(default_factory=dict)
    all_failed: list[bool] = field(default_factory=list)
    _warned: set[str] = field(default_factory=set)
    _metrics: MetricsLogger | None = None
    _phase: Phase | None = None  # the innermost open phase
    _spans: list[Span] = field(default_factory=list)
    _rank_spans: list[Span] = field(default_factory=list)
    _step_started: float = 0.0

    def begin_steps(self, metrics: MetricsLogger) -> None:
        """Begin to measure the first step after a start, or after the run has gone back to a
        snapshot.

        Args:
            metrics: Where the metrics of all steps are logged.
        """
        self._metrics = metrics
        self.pending = {}
        self.display.pop_times()  # The time of the start belongs to no step.
        self._step_started = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a phase while it runs; its duration in seconds becomes ``perf/<name>_time``."""
        # Phases may be nested; a status is shown beside the innermost one.
        outer = self._phase
        with self.display.phase(name) as self._phase:
            try:
                yield
            finally:
                self._phase = outer

    def show_status(self, status: Progress) -> None:
        """Show the status of a process that the driver waits for, beside the open phase, and its
        warnings, which may be the reason of the wait.
        """
        self.warn(status.get("warnings", []))
        if self._phase is not None:
            self._phase.update(status)

    def note(self, text: str) -> None:
        """Print a line."""
        self.display.note(text)

    def warn(self, warnings: Sequence[str]) -> None:
        """Print those warnings that were not printed before."""
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                self.note(f"warning: {warning}")

    def record_weights(self, report: UpdateReport) -> None:
        """Write the digest of the weights that the engines hold, if the audit has computed those of
        all tensors.
        """
        if self.display.run_dir is not None and report.digests:
            digest = digest_of_digests(report.digests)
            sent = SentWeights(report.version, digest, report.dtype, len(report.digests))
            append_weights(self.display.run_dir, sent)

    def add_rollout(self, batch: RolloutBatch) -> None:
        """Add a rollout's metrics to the current step, and show a few of its texts and its
        warnings.
        """
        # set when training ranks were replaced
        self.pending.setdefault("perf/trainer_restart_count", 0.0)
        self.pending.update(batch.metrics)
        self.all_failed.append(batch.metrics.get("rollout/failed_ratio") == 1.0)
        self.display.samples(batch.texts)
        self.warn(batch.warnings)

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Log an evaluation of the weights that ``step`` rollouts had trained."""
        self._logger.log(metrics, step, "eval/step")
        self.last_evaluation = metrics
        self.display.eval_line(step, metrics)

    def end_step(
        self, rollout_id: int, num_rollout: int, of_ranks: Sequence[Span] = ()
    ) -> list[Span]:
        """Log the step's metrics and begin the next step; returns the newest phases, for the
        rollout's trace.

        ``perf/wait_time_ratio`` is the fraction of the step outside of ``perf/train_time``, at most
        1.

        Args:
            of_ranks: What the training ranks did in this step; it is returned with the phases of
                the driver.
        """
        now = time.perf_counter()
        self._spans = [*self._spans, *self.display.timers.pop_spans()][-MOST_SPANS:]
        times = self.display.pop_times()
        step_seconds = now - self._step_started
        waited = sum(seconds for name, seconds in times.items() if name != "perf/train_time")
        step = self.pending | times
        step["perf/step_time"] = step_seconds
        step["perf/wait_time_ratio"] = min(waited / step_seconds, 1.0)
        self._step_started = now
        for name in self.left_out:
            step.pop(name, None)
        self._logger.log(step, rollout_id, "rollout/step")
        self.display.step_line(rollout_id, num_rollout, step, times)
        self.last_step = step
        self.pending = {}
        self._rank_spans = [*self._rank_spans, *of_ranks][-MOST_RANK_SPANS:]
        return [*self._spans, *self._rank_spans]

    def close_metrics(self, failed: bool = False) -> None:
        """Close the metrics, if they are open; :meth:`begin_steps` may follow.

        Args:
            failed: Whether an error ended the run.
        """
        if self._metrics is not None:
            self._metrics.close(failed)

    def close(self, failed: bool = False) -> None:
        """Close the metrics and the display; safe to call twice."""
        self.close_metrics(failed)
        self.display.close()

    @property
    def _logger(self) -> MetricsLogger:
        assert self._metrics is not None, "begin_steps comes first"
        return self._metrics
