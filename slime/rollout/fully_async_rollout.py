"""Fully asynchronous rollout: a standing pool of groups goes on generating while the trainer trains.

``--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async``, with ``train_async.py``.
How many groups may be under way is :class:`~slime.rollout.admission.Admission`'s matter, which bounds both memory and
staleness. Groups train in the order of admission, so slow prompts are not starved, and nothing that is finished is
thrown away. Updates of the weights go through while groups generate; a sample says by ``Sample.version_spans`` which
weights made which of its tokens.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from slime.data.sample import Group, flatten
from slime.data.source import DataSource
from slime.data.staleness import mask_older_versions
from slime.rollout.admission import Admission
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.loop import RolloutLoop, _InFlightGroup
from slime.rollout.state import GenerateState

if TYPE_CHECKING:
    from slime.config.args import Args


def generate_rollout_fully_async(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """The next ``--rollout-batch-size`` groups of the pool; the others stay under way.

    Raises:
        ValueError: evaluation (set ``--eval-function-path slime.rollout.sglang_rollout.generate_rollout``).
        TimeoutError: not there within ``--phase-timeout``.
    """
    from slime.engines.background import run

    if evaluation:
        raise ValueError(
            "the fully asynchronous rollout does not evaluate: "
            "set --eval-function-path slime.rollout.sglang_rollout.generate_rollout"
        )
    state = GenerateState(args)
    if not isinstance(state.pool, StandingPool) or state.pool.source is not data_source:
        open_pool(args, data_source, rollout_id)
    return run(state.pool.take(rollout_id))


def open_pool(
    args: Args, data_source: DataSource, first_step: int, last_step: int | None = None, ahead: int = 0
) -> StandingPool:
    """The pool of this run, empty; it is the one from which the rollout function takes."""
    pool = GenerateState(args).pool = StandingPool(args, data_source, first_step, last_step, ahead)
    return pool


generate_rollout_fully_async.open_pool = open_pool  # type: ignore[attr-defined]  # updates need not wait for it


class StandingPool(RolloutLoop):
    """The rollout loop with in_flight that outlive a rollout, judged in the order of admission.

    Used on one event loop. Whoever drives it says by :meth:`advance` how far training is.

    Args:
        first_step, last_step: the steps that it is to fill; see :class:`~slime.rollout.admission.Admission`.
        ahead: rollouts of these that somebody has already, from an earlier attempt.
    """

    def __init__(
        self, args: Args, data_source: DataSource, first_step: int = 0, last_step: int | None = None, ahead: int = 0
    ) -> None:
        super().__init__(args, -1, data_source)
        self.deterministic = True  # the oldest first
        self.admission = Admission(
            self.target,
            args.async_buffer_size,
            args.update_weights_interval,
            args.max_weight_staleness,
            first_step,
            last_step,
        )
        self.admission.open = ahead * self.target
        self._drained = False
        if hasattr(data_source, "under_way"):
            data_source.under_way = self.under_way  # so that a resume does not skip them

    def under_way(self) -> list[Group]:
        """The groups of the pool in the order of admission: finished, or as they were given to the engines last."""
        return [*(_as_it_is(item) for item in self.in_flight.values()), *self.unstarted]

    async def take(self, rollout_id: int) -> RolloutFnTrainOutput:
        """The next groups in the order of admission."""
        self.reset_for(rollout_id)
        self.deadline = time.monotonic() + self.settings.timeout
        try:
            await self._collect()
        except BaseException:
            await self.close()
            raise
        self._call_hooks()
        metrics = {**self.counts.metrics(), "rollout/under_way_group_count": float(len(self.in_flight))}
        return RolloutFnTrainOutput(samples=self.accepted, metrics=metrics)

    async def advance(self, version: int, taken: bool = False, trained: bool = False) -> None:
        """The trainer went on: start as many groups as may start now.

        Args:
            version: steps that had trained the weights that the engines hold.
            taken: it took a rollout.
            trained: the step of the rollout that it took last is over.
        """
        if version > self.admission.version:
            self._drained = False
        self.admission.version_changed(version)
        if trained:
            self.admission.trained()
        if taken:
            self.admission.taken()
        self._top_up()

    async def drain(self) -> None:
        """Start nothing more until :meth:`advance` tells new weights, and wait until no group is under way.

        Raises:
            TimeoutError: some went on for ``--phase-timeout``.
        """
        self._drained = True
        tasks = [item.task for item in self.in_flight.values() if item.task is not None]
        pending = (await asyncio.wait(tasks, timeout=self.settings.timeout))[1] if tasks else ()
        if pending:
            raise TimeoutError(
                f"{len(pending)} groups did not finish in {self.settings.timeout:g} s before a weight update"
            )

    async def close(self) -> None:
        """Cancel what is under way; its groups go back to the data source as they were given."""
        await self._cancel_all()
        back = self.under_way()
        self._clear()
        if back:
            self._return_to_source(back)

    def _top_up(self) -> None:
        while not self._drained and (room := self.admission.room()) > 0:
            if not self.unstarted:
                # Finished groups that a resumed pool gets wait for their turn, as they did before the run was stopped.
                self.unstarted.extend(self._get(room))
            self._start_all()

    def _add(self, original: Group, task: asyncio.Task[Group] | None = None) -> None:
        self.admission.admit()
        super()._add(original, task)

    def _ready(self) -> bool:
        """An empty pool waits: there is room again when the trainer goes on."""
        return bool(self.in_flight) and super()._ready()

    def _judge(self, item: _InFlightGroup) -> None:
        before = len(self.accepted)
        if self.settings.masks_earlier_rollouts:
            for sample in flatten(item.group):
                mask_older_versions(sample)
        super()._judge(item)
        if len(self.accepted) == before:
            self.admission.dropped()


def _as_it_is(item: _InFlightGroup) -> Group:
    """The group, generated where it is; a group whose task failed or goes on: as it was given."""
    task = item.task
    whole = task is not None and task.done() and not task.cancelled() and task.exception() is None
    return item.group if whole else item.original
