"""The phases of one iteration, as the loops in ``train.py`` and ``train_async.py`` call them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.backends.lr_schedule import zero_lr_warning
from slime.cluster.engine_pool import Evaluations
from slime.cluster.prefetch import Prefetcher, PrefetchSettings
from slime.cluster.rollout_manager import RolloutManager
from slime.weights.audit import gap_alarm

if TYPE_CHECKING:
    from slime.cluster.actors import Ref
    from slime.cluster.engine_pool import EnginePool
    from slime.cluster.manager_client import ManagerClient, RolloutBatch
    from slime.cluster.snapshots import Snapshots
    from slime.cluster.step_log import StepLog
    from slime.cluster.stop_signals import StopSignals
    from slime.cluster.trainer import Trainer
    from slime.config.args import Args


class Run:
    """A run that has been started. Every method waits until its phase is complete.

    Each phase is shown while it runs, fails after ``--phase-timeout`` seconds, and adds its duration to the metrics of
    the step.

    Attributes:
        first_rollout, num_rollout: The loop trains rollouts ``first_rollout`` to ``num_rollout - 1``.
        completed: Whether the ledger is closed and the summary was printed.
        asked: The rollouts that were requested and not waited for to the end, by their ids.
    """

    def __init__(
        self,
        args: Args,
        first_rollout: int,
        num_rollout: int,
        *,
        manager: ManagerClient,
        trainer: Trainer,
        pool: EnginePool,
        snapshots: Snapshots,
        log: StepLog,
        stop: StopSignals,
    ) -> None:
        self.args, self.first_rollout, self.num_rollout = args, first_rollout, num_rollout
        self.manager, self.trainer, self.pool, self.snapshots = manager, trainer, pool, snapshots
        self.log, self.stop = log, stop
        self.evaluations = Evaluations(manager, pool, log)
        self.completed = False
        self.asked: dict[int, Ref[RolloutBatch]] = {}
        self._warned_of_zero_lr = False

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Generate samples with rewards, split over the data-parallel ranks.

        If a signal ends the wait, the engines continue, and the next call waits for the same rollout.
        """
        with self.log.phase("rollout"):
            if rollout_id not in self.asked:
                self.asked[rollout_id] = self.manager.start(RolloutManager.generate, rollout_id)
            # The trainer is idle here, so engines that were restarted can get the weights during this wait.
            batch = self.manager.wait(
                self.asked[rollout_id],
                f"rollout {rollout_id} to be generated",
                meanwhile=self.pool.sync_recovered_engines,
            )
            del self.asked[rollout_id]
        self.log.add_rollout(batch)
        return batch

    def prefetch(self) -> Prefetcher:
        """Generate all rollouts of the asynchronous loop on a separate thread."""
        return Prefetcher(
            PrefetchSettings.from_args(self.args),
            range(self.first_rollout, self.num_rollout),
            manager=self.manager,
            pool=self.pool,
            evaluations=self.evaluations,
            snapshots=self.snapshots,
            log=self.log,
            stop=self.stop,
        )

    def offload_engines(self) -> None:
        """In a colocated run, move the accelerator memory from the engines to the trainer."""
        self.pool.offload()

    def train(self, rollout_id: int, batch: RolloutBatch) -> None:
        """Train critic and actor on a rollout; does nothing with ``--debug-rollout-only``."""
        if self.trainer.actor is None:
            return
        with self.log.phase("train"):
            self.trainer.train(rollout_id, batch.refs)
            dtypes = (self.args.train_dtype, self.args.rollout_quantization or self.args.rollout_dtype)
            if (alarm := gap_alarm(self.log.pending, self.args.logprob_gap_threshold, dtypes)) is not None:
                self.log.note(alarm)
            args = self.args
            warms_up = bool(args.lr_warmup_iters or args.lr_warmup_fraction or args.critic_lr_warmup_iters)
            warning = zero_lr_warning(self.log.pending, rollout_id, warms_up)
            if warning is not None and not self._warned_of_zero_lr:
                self._warned_of_zero_lr = True
                self.log.note(warning)
        # The manager keeps the state of each rollout until it is trained, for snapshots; now it can drop this one.
        self.manager.call("the rollout manager to note that a step is trained", RolloutManager.trained, rollout_id)
        self.trainer.log_memory("train")

    def save(self, rollout_id: int) -> None:
        """Write a snapshot; see :meth:`Snapshots.save`."""
        self.snapshots.save(rollout_id)

    def update_weights(self) -> None:
        """Send the actor's weights to every engine; see :meth:`EnginePool.update_weights`."""
        self.pool.update_weights()

    def evaluate(self, step: int) -> None:
        """Run all evaluation sets with the engines' weights, which ``step`` rollouts have trained."""
        self.evaluations.run(step)

    def end_step(self, rollout_id: int) -> None:
        """Log the step's metrics and begin the next step."""
        self.snapshots.commit_if_written()
        of_ranks = [span for group in self.trainer.groups for span in group.pop_spans()]
        phases = self.log.end_step(rollout_id, self.num_rollout, of_ranks)
        self.manager.call("the trace of a rollout to be completed", RolloutManager.add_phases, rollout_id, phases)

    # --- what is due when --------------------------------------------------------------------

    def is_due(self, rollout_id: int, interval: int | None) -> bool:
        """Whether an action is due after this rollout: every ``interval`` rollouts and after the last one.

        Without an interval, it is never due.
        """
        return interval is not None and ((rollout_id + 1) % interval == 0 or rollout_id + 1 == self.num_rollout)

    def evaluates_at_start(self) -> bool:
        """Whether to evaluate before the first step.

        A resumed run does so if an evaluation was due after the last step of its snapshot: the snapshot was written
        before that evaluation.
        """
        if self.first_rollout == 0:
            return bool(self.args.eval_interval) and not self.args.skip_eval_before_train
        return self.is_due(self.first_rollout - 1, self.args.eval_interval)
