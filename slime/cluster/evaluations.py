"""Evaluations with the engines' weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray import ObjectRef

    from slime.cluster.engine_pool import EnginePool
    from slime.cluster.manager_client import ManagerClient
    from slime.cluster.step_log import StepLog


class Evaluations:
    """All evaluation sets, generated and rewarded with the weights that the engines hold."""

    def __init__(self, manager: ManagerClient, pool: EnginePool, log: StepLog) -> None:
        self._manager, self._pool, self._log = manager, pool, log

    def run(self, step: int) -> None:
        """Evaluate weights that ``step`` rollouts have trained."""
        self.finish(step, self.start(step))

    def start(self, step: int) -> ObjectRef[Any]:
        """Begin an evaluation. Training may go on, but the weights must not change until :meth:`finish`."""
        return self._manager.handle.eval.remote(step)

    def finish(self, step: int, evaluation: ObjectRef[Any]) -> None:
        """Wait for what :meth:`start` returned, and log its metrics."""
        with self._log.phase("eval"):
            recover = partial(self._pool.sync_recovered_engines, keep_version=True)
            metrics = self._manager.wait(evaluation, "the evaluation", meanwhile=recover)
        self._log.log_evaluation(step, metrics)
