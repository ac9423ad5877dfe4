"""Fully asynchronous rollout: a standing pool of groups goes on generating while the trainer trains.

``--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async``. At most
``(1 + --async-buffer-size) * --rollout-batch-size`` groups are admitted and not yet trained, which bounds
both memory and staleness. Groups train in the order of admission, so slow prompts are not starved.
"""

from __future__ import annotations

import time
from typing import Any

from slime.data.sample import Group
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.loop import RolloutLoop
from slime.rollout.state import GenerateState


def generate_rollout_fully_async(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """The next ``--rollout-batch-size`` groups of the pool; the others stay under way.

    Raises:
        ValueError: evaluation (set ``--eval-function-path slime.rollout.sglang_rollout.generate_rollout``).
        TimeoutError: not there within ``--phase-timeout``.
    """
    from slime.utils.async_utils import run

    if evaluation:
        raise ValueError(
            "the fully asynchronous rollout does not evaluate: "
            "set --eval-function-path slime.rollout.sglang_rollout.generate_rollout"
        )
    return run(standing_pool(args, data_source).take(rollout_id))


def standing_pool(args: Any, data_source: Any) -> StandingPool:
    """The pool of this run."""
    state = GenerateState(args)
    if not isinstance(state.pool, StandingPool) or state.pool.source is not data_source:
        state.pool = StandingPool(args, data_source)
    return state.pool


class StandingPool(RolloutLoop):
    """The rollout loop with tickets that outlive a rollout, judged in the order of admission."""

    def __init__(self, args: Any, data_source: Any) -> None:
        super().__init__(args, -1, data_source)
        self.deterministic = True  # the oldest first
        self.capacity = self.target * (1 + max(int(getattr(args, "async_buffer_size", None) or 1), 0))
        if hasattr(data_source, "under_way"):
            data_source.under_way = self.under_way  # so that a resume does not skip them

    def under_way(self) -> list[Group]:
        """The groups of the pool as they were given, in the order of admission."""
        return [*(ticket.pristine for ticket in self.tickets.values()), *self.unstarted]

    async def take(self, rollout_id: int) -> RolloutFnTrainOutput:
        """The next groups in the order of admission."""
        self.begin(rollout_id)
        self.deadline = time.monotonic() + self.seconds
        try:
            await self._collect()
        except BaseException:
            await self.close()
            raise
        self._top_up()  # so that generation goes on while these are trained
        self._call_hooks()
        return RolloutFnTrainOutput(samples=self.accepted, metrics=self._metrics())

    async def close(self) -> None:
        """Cancel what is under way; its groups go back to the data source as they were given."""
        await self._cancel_all()
        back = self.under_way()
        self._forget()
        if back:
            self._give(back)

    def _top_up(self) -> None:
        while self._under_way < self.capacity:
            if not self.unstarted:
                self._take_in(self._fetch(self.capacity - self._under_way))
            self._start_all()

    def _fetch(self, missing: int) -> list[Any]:
        """Exactly as many as there is room for."""
        return self._get(missing)
