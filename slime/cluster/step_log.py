"""Display and metrics of the steps of a run: phases, notes and metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slime.observability.run_state import SentWeights, append_weights, digest_of_digests

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from slime.cluster.manager_client import RolloutBatch
    from slime.observability.display import Display, Phase
    from slime.observability.metrics import MetricsLogger
    from slime.observability.progress import Progress, Span
    from slime.weights.update import UpdateReport

MOST_SPANS = 500
"""How many of the newest timed phases are kept for the trace of a rollout."""
MOST_RANK_SPANS = 5000
"""The same of the training ranks: some steps of a thousand ranks."""


class StepLog:
    """Collects the metrics of the current step and times its phases; one per run, in the driver.

    Attributes:
        pending: Metrics of the current step, by name.
        last_step, last_evaluation: Metrics of the last complete step and of the last evaluation.
    """

    def __init__(self, display: Display) -> None:
        self.display = display
        self.pending: dict[str, float] = {}
        self.last_step: dict[str, float] = {}
        self.last_evaluation: dict[str, float] = {}
        self._metrics: MetricsLogger | None = None
        self._phase: Phase | None = None  # the innermost open phase
        self._spans: list[Span] = []
        self._rank_spans: list[Span] = []
        self._step_started = time.perf_counter()

    def begin_steps(self, metrics: MetricsLogger) -> None:
        """Begin to measure the first step after a start, or after the run has gone back to a snapshot.

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

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Time a part of a phase without showing it."""
        return self.display.timers(name)

    def show_status(self, status: Progress) -> None:
        """Show the status of a process that the driver waits for, beside the open phase."""
        if self._phase is not None:
            self._phase.update(status)

    def note(self, text: str) -> None:
        """Print a line."""
        self.display.note(text)

    def record_weights(self, report: UpdateReport) -> None:
        """Write the digest of the weights that the engines hold, if the audit has computed those of all tensors."""
        if self.display.run_dir is None or not report.digests:
            return
        digest = digest_of_digests(report.digests)
        append_weights(self.display.run_dir, SentWeights(report.version, digest, report.dtype, len(report.digests)))

    def add_rollout(self, batch: RolloutBatch) -> None:
        """Add a rollout's metrics to the current step, and show a few of its texts and its warnings."""
        self.pending.setdefault("perf/trainer_restart_count", 0.0)  # set when training ranks were replaced
        self.pending.update(batch.metrics)
        self.display.samples(batch.texts)
        for warning in batch.warnings:
            self.note(f"warning: {warning}")

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Log an evaluation of the weights that ``step`` rollouts had trained."""
        self._logger.log(metrics, step, "eval/step")
        self.last_evaluation = metrics
        self.display.eval_line(step, metrics)

    def end_step(self, rollout_id: int, num_rollout: int, of_ranks: Sequence[Span] = ()) -> list[Span]:
        """Log the step's metrics and begin the next step; returns the newest phases, for the rollout's trace.

        ``perf/wait_time_ratio`` is the fraction of the step outside of ``perf/train_time``, at most 1.

        Args:
            of_ranks: What the training ranks did in this step; it is returned with the phases of the driver.
        """
        now = time.perf_counter()
        self._spans = [*self._spans, *self.display.timers.pop_spans()][-MOST_SPANS:]
        times = self.display.pop_times()
        step_seconds = now - self._step_started
        waited = sum(seconds for name, seconds in times.items() if name != "perf/train_time")
        self.pending |= times
        self.pending["perf/step_time"] = step_seconds
        self.pending["perf/wait_time_ratio"] = min(waited / step_seconds, 1.0)
        self._step_started = now
        self._logger.log(self.pending, rollout_id, "rollout/step")
        self.display.step_line(rollout_id, num_rollout, self.pending, times)
        self.last_step, self.pending = self.pending, {}
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
