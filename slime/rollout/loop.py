"""The default rollout loop: keep enough groups in flight, judge the finished ones, return the rest
to the data source.

Every group that the data source supplied ends in exactly one place: in the result, dropped by the
filter (and counted), replaced because its verifier gave no result (and counted), or back in the
buffer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.flag import section
from slime.config.hooks import load_function
from slime.config.rollout import RolloutConfig
from slime.data.sample import Group, Sample, flatten
from slime.data.source import DataSource, RolloutDataSource
from slime.observability import progress
from slime.rollout.abort import abort_and_drain
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import call_dynamic_filter
from slime.rollout.group import continuable, generate_to_the_end, index_of, is_finished, snapshot
from slime.rollout.metrics import Counts
from slime.rollout.rm_hub.outcome import FAILURE_KEY, TOO_LONG, check_raised, is_too_long
from slime.rollout.state import GenerateState

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)
# times the rollout batch size; above it the run stops, because the verifier is broken, not slow
_MOST_REPLACED = 4


@dataclass
class _InFlightGroup:
    """One group that is being generated or waits to be judged.

    Attributes:
        order: The number of the group in the order of submission.
        original: The group as the data source supplied it.
        task: The task that generates the group; None if the group was already finished when it was
            submitted.
    """

    order: int
    original: Group
    task: asyncio.Task[Group] | None = None
    done: bool = False

    @property
    def group(self) -> Group:
        return self.original if self.task is None else self.task.result()


class RolloutLoop:
    """One rollout. With ``--deterministic``, groups are judged in the order of submission and none
    is aborted.

    Otherwise groups are judged in the order in which they finish, and the rollout aborts the groups
    that it does not need.
    """

    def __init__(self, args: Args, rollout_id: int, data_source: DataSource) -> None:
        self.args = args
        self.source = data_source
        self.settings = section(RolloutConfig, args)
        self.target = args.rollout_batch_size
        self.seconds = args.phase_timeout
        self.reward_key = args.reward_key
        self.state = GenerateState(args)
        self.deterministic = args.deterministic
        path = self.settings.dynamic_sampling_filter_path
        self.filter = load_function(path) if path else None
        # A standing pool holds thousands of groups, so the work per finished group must be O(1):
        # the order of completion has a queue of its own, and nothing below scans all groups when
        # one finishes.
        self.in_flight: OrderedDict[int, _InFlightGroup] = OrderedDict()
        """Groups that are being generated or wait to be judged, in the order of submission."""
        # keys of finished groups in the order of completion; not deterministic
        self._finished: deque[int] = deque()
        self._failed: _InFlightGroup | None = None
        self._woken = asyncio.Event()
        self.unstarted: deque[Group] = deque()
        self.deadline = 0.0
        self._submitted = 0
        self.reset_for(rollout_id)

    def reset_for(self, rollout_id: int) -> None:
        """Start a new rollout: clear what was collected for the previous one. Groups in flight
        stay.
        """
        self.rollout_id = self.state.rollout_id = rollout_id
        self.accepted: list[Group] = []
        # for the all-samples hook: accepted, dropped and replaced groups
        self.judged: list[Group] = []
        self.counts = Counts()

    async def run(self) -> RolloutFnTrainOutput:
        """Collect the groups, return the rest to the data source, and call the hooks.

        Raises:
            TimeoutError: The rollout did not finish within ``--phase-timeout``.
            RuntimeError: The data source has no more groups, or the verifier fails for too many of
                them.
        """
        self.deadline = time.monotonic() + self.seconds
        self.state.reset()
        self.state.rollout_id = self.rollout_id
        try:
            await self._collect()
            await self._hand_back()
        finally:
            await self.cancel_all()
            self.state.reset()
        # Groups are accepted in the order of completion, which depends on time. The trained batch
        # must not.
        self.accepted.sort(key=index_of)
        self._call_hooks()
        return RolloutFnTrainOutput(samples=self.accepted, metrics=self.counts.metrics())

    # --- collecting --------------------------------------------------------------------------

    async def _collect(self) -> None:
        self._report()
        while len(self.accepted) < self.target:
            self._top_up()
            await self._wait()
            # One group, then top up again: a filter's decision may depend on the number of groups
            # in flight, which must not depend on how many groups have finished in the meantime.
            if (item := self._next_finished()) is not None:
                self._judge(item)
                self._report()

    @property
    def _under_way(self) -> int:
        return len(self.accepted) + len(self.in_flight)

    def _top_up(self) -> None:
        """Submit groups until as many are accepted or in flight as the rollout needs.

        Groups are fetched ``--over-sampling-batch-size`` at a time if that is larger than the
        rollout, otherwise only as many as are missing.
        """
        while self._under_way < self.target:
            if not self.unstarted:
                size = self.settings.over_sampling_batch_size or 0
                self.enqueue(
                    self._get(size if size > self.target else self.target - self._under_way)
                )
            # Finished groups from the buffer may have filled the rollout already. Groups that have
            # not started then stay in `unstarted`, and _hand_back returns them without wasted
            # generation.
            if self._under_way < self.target:
                self._start(len(self.unstarted))

    def enqueue(self, groups: list[Group]) -> None:
        for group in groups:
            if is_finished(group):
                self._add(group)
            else:
                self.unstarted.append(group)

    def _get(self, count: int) -> list[Group]:
        groups = list(self.source.get_samples(count))
        if not groups:
            raise RuntimeError(
                f"the data source has no more groups: rollout {self.rollout_id} has accepted "
                f"{len(self.accepted)} of {self.target}{self.counts.drop_report()}"
            )
        for group in groups:
            self._notify("asked", group)
        return groups

    def _notify(self, event: str, group: Group, **facts: object) -> None:
        if self.state.observer is not None:
            self.state.observer(event, group, facts)

    def _start(self, most: int) -> None:
        for _ in range(min(most, len(self.unstarted))):
            group = self.unstarted.popleft()
            if is_finished(group):
                self._add(group)
                continue
            self._notify("started", group)
            # before generation: generate functions change samples in place
            original = snapshot(group)
            self._add(original, asyncio.ensure_future(self._generate(group, original)))

    def _add(self, original: Group, task: asyncio.Task[Group] | None = None) -> None:
        item = self.in_flight[self._submitted] = _InFlightGroup(self._submitted, original, task)
        self._submitted += 1
        if task is None:
            self._ended(item)
        else:
            task.add_done_callback(lambda _: self._ended(item))

    def _ended(self, item: _InFlightGroup) -> None:
        if self.in_flight.get(item.order) is not item:
            return  # the group was removed from the pool (cancelled); its task ends later
        item.done = True
        if _error(item) is not None and self._failed is None:
            self._failed = item
        if not self.deterministic:
            self._finished.append(item.order)
        if self._ready():
            self._woken.set()

    async def _generate(self, group: Group, original: Group) -> Group:
        """Generate and score a group. Returns it finished, or partial if the rollout aborted it."""
        tell = functools.partial(self._notify, "continued")
        params = self.state.sampling_params
        return packed(
            await generate_to_the_end(self.state, group, original, params, on_continue=tell)
        )

    def _ready(self) -> bool:
        """Whether :meth:`_wait` may return: a group can be judged, a group failed, or no group is
        in flight.
        """
        if self.deterministic:
            head = next(iter(self.in_flight.values()), None)
            return head is None or head.done or self._failed is not None
        return bool(self._finished) or not self.in_flight or self._failed is not None

    async def _wait(self) -> None:
        """Wait until a group can be judged. An error of any group is raised at once, whichever
        group is next.
        """
        if not self._ready():
            self._woken.clear()
            try:
                async with asyncio.timeout(max(self.deadline - time.monotonic(), 0.0)):
                    await self._woken.wait()
            except TimeoutError as error:
                raise TimeoutError(self._deadline_report()) from error
        if self._failed is not None:
            self._raise(self._failed)

    def _raise(self, item: _InFlightGroup) -> None:
        error = _error(item)
        if error is not None:
            error.add_note(f"rollout {self.rollout_id}, group of sample {index_of(item.original)}")
            raise error

    def _next_finished(self) -> _InFlightGroup | None:
        """Remove and return the next group to judge, or None. In deterministic mode it is always
        the oldest one.
        """
        if self.deterministic:
            head = next(iter(self.in_flight.values()), None)
            return self.in_flight.pop(head.order) if head is not None and head.done else None
        return self.in_flight.pop(self._finished.popleft()) if self._finished else None

    # --- judging -----------------------------------------------------------------------------

    def _judge(self, item: _InFlightGroup) -> None:
        # Counted in any case, whatever becomes of the group.
        group = item.group
        leaves = flatten(group)
        self._notify("generated", group)
        # kept only for the hook, since dropped groups can be many
        if self.settings.rollout_all_samples_process_path:
            self.judged.append(group)
        self.counts.add(leaves, self.reward_key)
        check_raised(
            f"rollout {self.rollout_id}",
            leaves,
            self.counts.raised,
            self.args.reward_max_error_share,
            self.target * self.args.n_samples_per_prompt,
        )
        if all(map(is_too_long, leaves)):
            self._drop_too_long(leaves)
            self._notify("filtered", group, reason=TOO_LONG)
            return
        # A sample without a verifier result has no reward and must not influence the filter or the
        # group's baseline. A group needs two samples with rewards for a comparison (one, if it has
        # only one sample).
        valid = [
            entry
            for entry in group
            if not any(sample.reward_timed_out for sample in flatten(entry))
        ]
        if len(valid) < min(2, len(group)):
            self._replace(leaves)
            self._notify("replaced", group)
            return
        reason = self._drop_reason(group if len(valid) == len(group) else valid)
        # again: a filter that reads per-token fields turns them back into Python lists
        packed(group)
        if reason is None:
            self.accepted.append(group)
            self._notify("accepted", group, rollout_id=self.rollout_id)
        else:
            self.counts.dropped[reason] += 1
            self._notify("filtered", group, reason=reason)

    def _drop_too_long(self, leaves: list[Sample]) -> None:
        self.counts.dropped[TOO_LONG] += 1
        # A few long prompts are normal. If no group at all was accepted, the limit or the data set
        # is wrong, and the loop would otherwise read prompts forever.
        if not self.accepted and self.counts.dropped[TOO_LONG] > _MOST_REPLACED * self.target:
            raise RuntimeError(
                f"rollout {self.rollout_id}: {self.counts.dropped[TOO_LONG]} prompts in a row "
                "leave no room for a response; the last one: "
                f"{leaves[-1].metadata.get(FAILURE_KEY)}"
            )

    def _replace(self, leaves: list[Sample]) -> None:
        self.counts.replaced += 1
        if self.counts.replaced > _MOST_REPLACED * self.target:
            failures = [
                str(sample.metadata.get(FAILURE_KEY))
                for sample in leaves
                if sample.reward_timed_out
            ]
            raise RuntimeError(
                f"rollout {self.rollout_id}: the verifier gave no result for "
                f"{self.counts.replaced} groups; {len(self.accepted)} of {self.target} have "
                f"rewards; the last failure: {failures[-1]}"
            )

    def _drop_reason(self, group: Group) -> str | None:
        """Return the reason for which the filter drops a group, or None if it keeps the group."""
        if self.filter is None:
            return None
        answer = call_dynamic_filter(self.filter, self.args, group)
        if answer.keep or (answer.keep_when_insufficient and self._lacks_groups()):
            return None
        return answer.reason or "no_reason"

    def _lacks_groups(self) -> bool:
        """Whether the rollout has no more groups in flight than it still needs."""
        # + 1: the group under judgment has left `in_flight` and is not in `accepted` yet.
        return self._under_way + 1 <= self.target

    # --- the rest ----------------------------------------------------------------------------

    async def _hand_back(self) -> None:
        """Return the groups that the rollout does not need to the data source, in the order of
        submission.
        """
        # Unfinished groups end first: by themselves if the run is deterministic, otherwise by an
        # abort.
        in_flight = self.in_flight.values()
        tasks = [item.task for item in in_flight if item.task is not None and not item.task.done()]
        # how far an aborted group got would depend on time, so let all of them finish
        if tasks and self.deterministic:
            _, pending = await asyncio.wait(
                tasks, timeout=max(self.deadline - time.monotonic(), 0.0)
            )
            if pending:
                raise TimeoutError(self._deadline_report())
        elif tasks:
            await abort_and_drain(self.state, tasks, self.deadline)
        # What was generated is kept as far as the flags allow.
        back = []
        for item in in_flight:
            self._raise(item)
            group = item.group
            if is_finished(group):
                self.counts.surplus += 1
                if self.settings.mask_offpolicy_in_partial_rollout:
                    # a later rollout would mask every token: generate the group again
                    group = item.original
            else:
                self.counts.aborted += 1
                group = continuable(group, item.original, self.settings.partial_rollout)
            back.append(group)
        # Groups that never started follow, in the order in which they were fetched.
        back += self.unstarted
        self._clear()
        for sample in flatten(back):
            # setdefault: the first rollout that generated tokens of the sample decides which tokens
            # are masked later.
            if sample.response_length:
                sample.metadata.setdefault("start_rollout_id", self.rollout_id)
        if back:
            self._return_to_source(back)

    def _clear(self) -> None:
        self.in_flight.clear()
        self.unstarted.clear()
        self._finished.clear()
        self._failed = None

    def _return_to_source(self, groups: list[Group]) -> None:
        self.source.add_samples(groups)
        for group in groups:
            self._notify("given_back", group)
        # it has no buffer
        if getattr(type(self.source), "add_samples", None) is RolloutDataSource.add_samples:
            self.counts.lost = len(groups)
            name = type(self.source).__name__
            other = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
            logger.warning(
                "%d groups are lost: %s has no buffer. Set --data-source-path %s",
                len(groups),
                name,
                other,
            )

    async def cancel_all(self) -> None:
        """Cancel the tasks of all groups in flight, and wait for their end."""
        tasks = [item.task for item in self.in_flight.values() if item.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _call_hooks(self) -> None:
        path = self.settings.rollout_sample_filter_path
        if path:
            load_function(path)(self.args, self.accepted)
        if path := self.settings.rollout_all_samples_process_path:
            self.judged.sort(key=index_of)
            load_function(path)(self.args, self.judged, self.source)

    # --- reports -----------------------------------------------------------------------------

    def _report(self) -> None:
        progress.report("generate", len(self.accepted), self.target, **self.counts.numbers())

    def _deadline_report(self) -> str:
        waiting = [index_of(item.original) for item in self.in_flight.values() if not item.done]
        return (
            f"rollout {self.rollout_id} did not finish within {self.seconds:g} s "
            f"(--phase-timeout): {len(self.accepted)} of {self.target} groups are "
            f"accepted{self.counts.drop_report()}; it still waits for {len(waiting)} groups, "
            f"whose first samples are {waiting[:8]}{' ...' if len(waiting) > 8 else ''}"
        )


def _error(item: _InFlightGroup) -> BaseException | None:
    task = item.task
    return None if task is None or not task.done() or task.cancelled() else task.exception()


def packed(group: Group) -> Group:
    """Store per-token fields as arrays, in place. No user function may work on the group: it could
    hold their lists.
    """
    for sample in flatten(group):
        sample.pack()
    return group
