"""What rollout functions of older releases find in ``slime.rollout.sglang_rollout``: the state that
also holds the groups in flight, and an abort that returns them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime.data.sample import Group, flatten
from slime.rollout import abort as engines
from slime.rollout import state
from slime.rollout.group import generate_and_rm_group, index_of

if TYPE_CHECKING:
    from slime.config.args import Args


class GenerateState(state.GenerateState):
    """The state of a run with the groups that a rollout function has submitted.

    Attributes:
        pendings: The tasks of groups in flight. Functions replace it by what ``asyncio.wait``
            leaves.
        remaining_batch_size: The number of groups that were submitted and that the function has
            not dropped.
    """

    def __new__(cls, args: Args) -> GenerateState:
        known = super().__new__(cls, args)
        # The run itself makes the state that belongs to the arguments, before a function asks.
        if not isinstance(known, cls):
            known.__class__ = cls
            known.reset()
        assert isinstance(known, cls)
        return known

    @property
    def group_sampling_seeds(self) -> list[int]:
        """One seed for each sample of a group, for copies of older rollout functions. slime's own
        requests have a seed per sample of the run."""
        return [self.seed + offset for offset in range(self.args.n_samples_per_prompt)]

    def reset(self) -> None:
        super().reset()
        self.pendings: set[asyncio.Task[Group]] = set()
        self.remaining_batch_size = 0

    def submit_generate_tasks(self, samples: Sequence[Group]) -> None:
        """Start the generation of groups on the running event loop."""
        for group in samples:
            work = generate_and_rm_group(self.args, group, self.sampling_params.copy())
            self.pendings.add(asyncio.create_task(work))
        self.remaining_batch_size += len(samples)


async def abort(args: Args, rollout_id: int | None = None) -> list[Group]:
    """Abort all requests, and wait for the groups in flight that ``GenerateState.pendings`` holds.

    Returns:
        With ``--partial-rollout`` these groups, to be put back; otherwise none. Their samples
        with tokens note ``rollout_id`` in ``metadata["start_rollout_id"]``.

    Raises:
        TimeoutError: Some did not end within ``--phase-timeout``.
    """
    shared = GenerateState(args)
    tasks = shared.pendings
    shared.pendings = set()
    await engines.abort(shared)
    await engines.abort_and_drain(shared, tasks, time.monotonic() + args.phase_timeout)
    groups = sorted((task.result() for task in tasks), key=index_of)
    if not args.partial_rollout:
        return []
    for sample in flatten(groups):
        if sample.response_length:
            sample.metadata.setdefault("start_rollout_id", rollout_id)
    return groups
