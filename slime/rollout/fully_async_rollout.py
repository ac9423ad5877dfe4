"""Fully asynchronous rollout: a standing pool of groups keeps generating while the trainer trains.

Use with ``train_async.py`` and ``--rollout-function-path
slime.rollout.fully_async_rollout.generate_rollout_fully_async``.
:class:`~slime.rollout.admission.Admission` decides how many groups may be in flight, which bounds
both memory and staleness. Groups are trained in the order of admission, so slow prompts are not
starved, and no finished group is discarded for its age. Weights are updated while groups generate;
``Sample.version_spans`` records which weight version generated which tokens.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from slime.data.sample import Group, flatten
from slime.data.source import DataSource
from slime.data.staleness import mask_older_versions
from slime.observability.files import warn
from slime.rollout.admission import Admission
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.loop import RolloutLoop, _InFlightGroup
from slime.rollout.state import GenerateState

if TYPE_CHECKING:
    from slime.config.args import Args


def generate_rollout_fully_async(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Take the next ``--rollout-batch-size`` groups from the pool and wait for them. The others
    stay in flight.

    Raises:
        ValueError: ``evaluation`` is True. For evaluation, set ``--eval-function-path
            slime.rollout.sglang_rollout.generate_rollout``.
        TimeoutError: The groups were not finished within ``--phase-timeout``.
    """
    from slime.engines.background import run

    if evaluation:
        raise ValueError(
            "the fully asynchronous rollout cannot evaluate: "
            "set --eval-function-path slime.rollout.sglang_rollout.generate_rollout"
        )
    state = GenerateState(args)
    if not isinstance(state.pool, StandingPool) or state.pool.source is not data_source:
        StandingPool(args, data_source, rollout_id)
    return run(state.pool.take(rollout_id))


class StandingPool(RolloutLoop):
    """A rollout loop whose groups in flight outlive a rollout and are judged in the order of
    admission. The rollout function takes its groups from the newest one of a run.

    All methods must be called on one event loop. The caller reports the progress of training with
    :meth:`advance`.

    Args:
        first_step, last_step: The steps to generate for; see
            :class:`~slime.rollout.admission.Admission`.
        ahead: Number of rollouts of these steps that already exist, from an earlier attempt.
        version: Version of the engines' weights; None for ``first_step``.
    """

    def __init__(
        self, args: Args, data_source: DataSource, first_step: int = 0, last_step: int | None = None, ahead: int = 0,
        version: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(args, -1, data_source)
        self.state.pool = self
        # Always, not only with --deterministic: Admission's bound on staleness assumes that groups
        # are trained in the order of admission.
        self.deterministic = True
        # Rollouts that exist already count as admitted, as they did when the run was stopped.
        self.admission = Admission(
            self.target,
            args.async_buffer_size,
            args.update_weights_interval,
            args.max_weight_staleness,
            first_step,
            last_step,
            version,
        )
        self.admission.open = ahead * self.target
        self._drained = False
        if hasattr(data_source, "under_way"):
            # snapshots save these groups, so that a resume does not skip them
            data_source.under_way = self.under_way
        elif args.save_interval or args.save:
            name = type(data_source).__name__
            warn(
                f"a resumed run will not generate the groups that are in progress: {name} does "
                "not keep them. A subclass of "
                "slime.rollout.data_source.RolloutDataSourceWithBuffer does"
            )

    def under_way(self) -> list[Group]:
        """Return the groups of the pool in the order of admission, each finished or as it was
        before generation.
        """
        return [*(_as_it_is(item) for item in self.in_flight.values()), *self.unstarted]

    async def take(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Return the next groups in the order of admission. On an error, the pool is closed before
        it is raised.
        """
        self.reset_for(rollout_id)
        self.deadline = time.monotonic() + self.seconds
        try:
            await self._collect()
        except BaseException:
            await self.close()
            raise
        self._call_hooks()
        metrics = {
            **self.counts.metrics(),
            "rollout/under_way_group_count": float(len(self.in_flight)),
        }
        return RolloutFnTrainOutput(samples=self.accepted, metrics=metrics)

    async def advance(self, version: int, taken: bool = False, trained: bool = False) -> None:
        """Record the trainer's progress and start as many groups as admission allows now.

        Args:
            version: The version of the engines' weights: the number of steps that have trained
                them.
            taken: Whether the trainer took a rollout.
            trained: Whether the step of the rollout that it took last is finished.
        """
        if version > self.admission.version:
            self._drained = False
        self.admission.version_changed(version)
        # In this order: trained() counts everything taken so far as trained, and the rollout that
        # is taken now is not.
        if trained:
            self.admission.trained()
        if taken:
            self.admission.taken()
        self._top_up()

    async def drain(self) -> None:
        """Wait until all groups in flight are finished. No group starts until :meth:`advance`
        reports newer weights.

        Raises:
            TimeoutError: Some groups did not finish within ``--phase-timeout``.
        """
        self._drained = True
        tasks = [item.task for item in self.in_flight.values() if item.task is not None]
        pending = (await asyncio.wait(tasks, timeout=self.seconds))[1] if tasks else ()
        if pending:
            raise TimeoutError(
                f"{len(pending)} groups did not finish within {self.seconds:g} s before "
                "a weight update"
            )

    async def close(self) -> None:
        """Cancel all generation. Groups return to the data source: finished, or as they were before
        generation.
        """
        await self.cancel_all()
        back = self.under_way()
        self._clear()
        if back:
            self._return_to_source(back)

    def _top_up(self) -> None:
        while not self._drained and (room := self.admission.room()) > 0:
            if not self.unstarted:
                # Unlike the default loop, finished groups from the buffer do not overtake others:
                # in a resumed run they wait for their turn, as they did before the run was stopped,
                # so that the same batches are trained.
                self.unstarted.extend(self._get(room))
            self._start(room)  # a user's source may have returned more groups

    def _add(self, original: Group, task: asyncio.Task[Group] | None = None) -> None:
        self.admission.admit()
        super()._add(original, task)

    def _ready(self) -> bool:
        """An empty pool waits: :meth:`advance` starts groups when the trainer makes room."""
        return bool(self.in_flight) and super()._ready()

    def _judge(self, item: _InFlightGroup) -> None:
        before = len(self.accepted)
        # A group in flight may contain tokens of several weight versions. This setting trains only
        # the newest ones.
        if self.settings.mask_offpolicy_in_partial_rollout:
            for sample in flatten(item.group):
                mask_older_versions(sample)
        super()._judge(item)
        if len(self.accepted) == before:
            self.admission.dropped()

    def _lacks_groups(self) -> bool:
        """Whether this rollout has dropped as many groups as the buffer holds
        (``--async-buffer-size`` rollouts).

        The groups in flight say nothing: each dropped one is replaced, so there would always be
        enough of them, and their number depends on how far training is.
        """
        dropped = self.counts.dropped.total() + self.counts.replaced
        return dropped >= self.admission.capacity - self.target


# The rollout manager looks for this attribute: a rollout function that has it keeps a standing
# pool, so weight updates take place while its groups generate.
generate_rollout_fully_async.open_pool = StandingPool  # type: ignore[attr-defined]


def _as_it_is(item: _InFlightGroup) -> Group:
    """Return the group if its generation succeeded, otherwise the group as it was before
    generation.
    """
    task = item.task
    whole = task is not None and task.done() and not task.cancelled() and task.exception() is None
    return item.group if whole else item.original
