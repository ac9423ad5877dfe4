"""Fully asynchronous rollout: a standing pool of groups goes on generating while the trainer trains.

``--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async``, with ``train_async.py``.
How many groups may be under way is :class:`~slime.rollout.admission.Admission`'s matter, which bounds both memory and
staleness. Groups train in the order of admission, so slow prompts are not starved, and nothing that is finished is
thrown away. Updates of the weights go through while groups generate; a sample says by ``Sample.version_spans`` which
weights made which of its tokens.
"""

from __future__ import annotations

import time
from typing import Any

from slime.data.sample import Group, flatten
from slime.data.staleness import mask_older_versions
from slime.rollout.admission import Admission
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.loop import RolloutLoop, _error, _Ticket
from slime.rollout.state import GenerateState


def generate_rollout_fully_async(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
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
    args: Any, data_source: Any, first_step: int, last_step: int | None = None, ahead: int = 0
) -> StandingPool:
    """The pool of this run, empty; it is the one from which the rollout function takes."""
    pool = GenerateState(args).pool = StandingPool(args, data_source, first_step, last_step, ahead)
    return pool


generate_rollout_fully_async.open_pool = open_pool  # type: ignore[attr-defined]  # updates need not wait for it


class StandingPool(RolloutLoop):
    """The rollout loop with tickets that outlive a rollout, judged in the order of admission.

    Used on one event loop. Whoever drives it says by :meth:`advance` how far training is.

    Args:
        first_step, last_step: the steps that it is to fill; see :class:`~slime.rollout.admission.Admission`.
        ahead: rollouts of these that somebody has already, from an earlier attempt.
    """

    def __init__(
        self, args: Any, data_source: Any, first_step: int = 0, last_step: int | None = None, ahead: int = 0
    ) -> None:
        super().__init__(args, -1, data_source)
        self.deterministic = True  # the oldest first
        self.admission = Admission(
            self.target,
            getattr(args, "async_buffer_size", 1),
            getattr(args, "update_weights_interval", 1),
            getattr(args, "max_weight_staleness", None),
            first_step,
            last_step,
        )
        self.admission.open = ahead * self.target
        if hasattr(data_source, "under_way"):
            data_source.under_way = self.under_way  # so that a resume does not skip them

    def under_way(self) -> list[Group]:
        """The groups of the pool in the order of admission: finished, or as they were given to the engines last."""
        tickets = self.tickets.values()
        return [*(t.group if t.done and _error(t) is None else t.pristine for t in tickets), *self.unstarted]

    async def take(self, rollout_id: int) -> RolloutFnTrainOutput:
        """The next groups in the order of admission."""
        self.begin(rollout_id)
        self.deadline = time.monotonic() + self.seconds
        try:
            await self._collect()
        except BaseException:
            await self.close()
            raise
        self._call_hooks()
        metrics = {**self._metrics(), "rollout/under_way_group_count": float(len(self.tickets))}
        return RolloutFnTrainOutput(samples=self.accepted, metrics=metrics)

    async def advance(self, version: int, taken: bool = False, trained: bool = False) -> None:
        """The trainer went on: start as many groups as may start now.

        Args:
            version: steps that had trained the weights that the engines hold.
            taken: it took a rollout.
            trained: the step of the rollout that it took last is over.
        """
        self.admission.version_changed(version)
        if trained:
            self.admission.trained()
        if taken:
            self.admission.taken()
        self._top_up()

    async def close(self) -> None:
        """Cancel what is under way; its groups go back to the data source as they were given."""
        await self._cancel_all()
        back = self.under_way()
        self._forget()
        if back:
            self._give(back)

    def _top_up(self) -> None:
        while (room := self.admission.room()) > 0:
            if not self.unstarted:
                self._take_in(self._get(room))
            self._start_all()

    def _add(self, group: Group, task: Any = None) -> None:
        self.admission.admit()
        super()._add(group, task)

    def _ready(self) -> bool:
        """An empty pool waits: there is room again when the trainer goes on."""
        return bool(self.tickets) and super()._ready()

    def _judge(self, ticket: _Ticket) -> None:
        before = len(self.accepted)
        if getattr(self.args, "mask_offpolicy_in_partial_rollout", False):
            for sample in flatten(ticket.group):
                mask_older_versions(sample)
        super()._judge(ticket)
        if len(self.accepted) == before:
            self.admission.dropped()
