"""The default rollout loop: keep enough groups under way, judge the finished ones, hand the rest back.

Every group that the data source gave ends in exactly one place: in the result, dropped by the filter
(and counted), replaced because its verifier gave no answers (and counted), or back in the buffer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.hooks import load_function
from slime.data.sample import Group, Sample, flatten
from slime.data.source import DataSource, RolloutDataSource
from slime.observability import progress
from slime.rollout.abort import abort_and_drain, rest_seconds
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import call_dynamic_filter
from slime.rollout.group import continuable, generate_and_rm_group, is_finished, snapshot
from slime.rollout.metrics import Counts
from slime.rollout.rm_hub.outcome import FAILURE_KEY, TOO_LONG, is_too_long
from slime.rollout.settings import LoopSettings
from slime.rollout.state import GenerateState
from slime.rollout.weight_timeline import TIMELINE

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)
_MOST_REPLACED = 4  # times the rollout batch size: then the verifier is broken, not slow


@dataclass
class _InFlightGroup:
    """One group that is being generated or waits to be judged. ``original`` is the group as the data source gave it."""

    order: int
    original: Group
    task: asyncio.Task[Group] | None = None  # None: it was finished when it came
    done: bool = False

    @property
    def group(self) -> Group:
        return self.original if self.task is None else self.task.result()


class RolloutLoop:
    """One rollout. ``--deterministic`` judges groups in the order of submission and aborts none."""

    def __init__(self, args: Args, rollout_id: int, data_source: DataSource) -> None:
        self.args = args
        self.source = data_source
        self.settings = LoopSettings.from_args(args)
        self.target = self.settings.groups
        self.state = GenerateState(args)
        self.deterministic = self.settings.deterministic
        path = self.settings.dynamic_filter_path
        self.filter = load_function(path) if path else None
        # A pool holds thousands of groups, so nothing below looks at all of them for each one that ends.
        self.in_flight: OrderedDict[int, _InFlightGroup] = OrderedDict()
        """Groups that are generated or finished, in order of submission."""
        self._finished: deque[int] = deque()  # the finished ones, in order of completion
        self._failed: _InFlightGroup | None = None
        self._woken = asyncio.Event()
        self.unstarted: deque[Group] = deque()
        self.deadline = 0.0
        self._submitted = 0
        self.reset_for(rollout_id)

    def reset_for(self, rollout_id: int) -> None:
        """Clear what is collected per rollout."""
        self.rollout_id = self.state.rollout_id = rollout_id
        self.accepted: list[Group] = []
        self.judged: list[Group] = []  # what the all-samples hook sees: accepted, dropped and replaced ones
        self.counts = Counts()

    async def run(self) -> RolloutFnTrainOutput:
        """Collect, hand back the rest, call the hooks.

        Raises:
            TimeoutError: not done within ``--phase-timeout``.
            RuntimeError: the data source ran dry.
        """
        self.deadline = time.monotonic() + self.settings.timeout
        self.state.reset()
        self.state.rollout_id = self.rollout_id
        try:
            await self._collect()
            await self._hand_back()
        finally:
            await self._cancel_all()
            self.state.reset()
        self.accepted.sort(key=_index)
        self._call_hooks()
        return RolloutFnTrainOutput(samples=self.accepted, metrics=self.counts.metrics())

    # --- collecting --------------------------------------------------------------------------

    async def _collect(self) -> None:
        self._report()
        while len(self.accepted) < self.target:
            self._top_up()
            await self._wait()
            while len(self.accepted) < self.target and (item := self._next_finished()) is not None:
                self._judge(item)
                self._report()

    @property
    def _under_way(self) -> int:
        return len(self.accepted) + len(self.in_flight)

    def _top_up(self) -> None:
        """Have as many groups accepted or under way as the rollout needs; finished ones from the buffer first.

        They are fetched ``--over-sampling-batch-size`` at a time where that is larger than the rollout, else as many as
        are missing.
        """
        while self._under_way < self.target:
            if not self.unstarted:
                size = self.settings.fetched_at_once
                self._enqueue(self._get(size if size > self.target else self.target - self._under_way))
            if self._under_way < self.target:
                self._start_all()

    def _enqueue(self, groups: list[Group]) -> None:
        for group in groups:
            if is_finished(group):
                self._add(group)
            else:
                self.unstarted.append(group)

    def _get(self, count: int) -> list[Group]:
        groups = list(self.source.get_samples(count))
        if not groups:
            raise RuntimeError(
                f"the data source gave no more groups: rollout {self.rollout_id} has "
                f"{len(self.accepted)} of {self.target}{self.counts.drop_report()}"
            )
        for group in groups:
            self._notify("asked", group)
        return groups

    def _notify(self, event: str, group: Group, **facts: object) -> None:
        if self.state.observer is not None:
            self.state.observer(event, group, facts)

    def _start_all(self) -> None:
        while self.unstarted:
            group = self.unstarted.popleft()
            if is_finished(group):
                self._add(group)
                continue
            self._notify("started", group)
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
            return  # cancelled and forgotten
        item.done = True
        if _error(item) is not None and self._failed is None:
            self._failed = item
        if not self.deterministic:
            self._finished.append(item.order)
        if self._ready():
            self._woken.set()

    async def _generate(self, group: Group, original: Group) -> Group:
        """The group, finished; or as far as it came when the rollout aborted it.

        Where an engine ends a request that nobody aborted (a restart, a weight update), it goes on at once from the
        tokens so far, whether or not it is its turn to be judged.
        """
        TIMELINE.set(self.state.schedule)
        retries = 0
        while True:
            before = _tokens(group)
            group = await generate_and_rm_group(self.args, group, self.state.sampling_params)
            if self.state.aborted or not any(s.status is Sample.Status.ABORTED for s in flatten(group)):
                return _packed(group)
            self._notify("continued", group)
            group = continuable(group, snapshot(original), partial=True)
            retries = 0 if _tokens(group) > before else retries + 1
            await asyncio.sleep(rest_seconds(f"group {_index(group)}", retries))

    def _ready(self) -> bool:
        """Whether a group can be judged, or one failed, or there is nothing to wait for."""
        if self.deterministic:
            head = next(iter(self.in_flight.values()), None)
            return head is None or head.done or self._failed is not None
        return bool(self._finished) or not self.in_flight or self._failed is not None

    async def _wait(self) -> None:
        """Until a group is there to be judged; a task's own error propagates."""
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
            error.add_note(f"rollout {self.rollout_id}, group of sample {_index(item.original)}")
            raise error

    def _next_finished(self) -> _InFlightGroup | None:
        """The next group to judge: in deterministic mode only ever the oldest."""
        if self.deterministic:
            head = next(iter(self.in_flight.values()), None)
            return self.in_flight.pop(head.order) if head is not None and head.done else None
        return self.in_flight.pop(self._finished.popleft()) if self._finished else None

    # --- judging -----------------------------------------------------------------------------

    def _judge(self, item: _InFlightGroup) -> None:
        group = item.group
        leaves = flatten(group)
        self._notify("generated", group)
        if self.settings.all_samples_path:
            self.judged.append(group)
        self.counts.add(leaves, self.settings.reward_key)
        if all(map(is_too_long, leaves)):
            self._drop_too_long(leaves)
            self._notify("filtered", group, reason=TOO_LONG)
            return
        valid = [entry for entry in group if not any(sample.reward_timed_out for sample in flatten(entry))]
        if len(valid) < min(2, len(group)):
            self._replace(leaves)
            self._notify("replaced", group)
            return
        reason = self._why_not(group if len(valid) == len(group) else valid)
        if reason is None:
            self.accepted.append(group)
            self._notify("accepted", group, rollout_id=self.rollout_id)
        else:
            self.counts.dropped[reason] += 1
            self._notify("filtered", group, reason=reason)
        _packed(group)  # the filter may have read lists

    def _drop_too_long(self, leaves: list[Sample]) -> None:
        self.counts.dropped[TOO_LONG] += 1
        if not self.accepted and self.counts.dropped[TOO_LONG] > _MOST_REPLACED * self.target:
            raise RuntimeError(
                f"rollout {self.rollout_id}: {self.counts.dropped[TOO_LONG]} prompts one after the other leave no room "
                f"for an answer; the last: {leaves[-1].metadata.get(FAILURE_KEY)}"
            )

    def _replace(self, leaves: list[Sample]) -> None:
        self.counts.replaced += 1
        if self.counts.replaced > _MOST_REPLACED * self.target:
            failures = [str(sample.metadata.get(FAILURE_KEY)) for sample in leaves if sample.reward_timed_out]
            raise RuntimeError(
                f"rollout {self.rollout_id}: the verifier gave no answer for {self.counts.replaced} groups, "
                f"{len(self.accepted)} of {self.target} have rewards; the last failure: {failures[-1]}"
            )

    def _why_not(self, group: Group) -> str | None:
        """Why the filter drops a group; None: it does not."""
        if self.filter is None:
            return None
        answer = call_dynamic_filter(self.filter, self.args, group)
        if answer.keep or (answer.keep_when_insufficient and self._under_way + 1 <= self.target):
            return None
        return answer.reason or "no_reason"

    # --- the rest ----------------------------------------------------------------------------

    async def _hand_back(self) -> None:
        """What is left goes to the data source, in the order it came from there."""
        in_flight = self.in_flight.values()
        tasks = [item.task for item in in_flight if item.task is not None and not item.task.done()]
        if tasks and self.deterministic:
            _, pending = await asyncio.wait(tasks, timeout=max(self.deadline - time.monotonic(), 0.0))
            if pending:
                raise TimeoutError(self._deadline_report())
        elif tasks:
            await abort_and_drain(self.args, tasks, self.deadline)
        back = []
        for item in in_flight:
            self._raise(item)
            group = item.group
            if is_finished(group):
                self.counts.surplus += 1
                if self.settings.masks_earlier_rollouts:
                    group = item.original  # all of it would be masked later: generate it anew
            else:
                self.counts.aborted += 1
                group = continuable(group, item.original, self.settings.partial_rollout)
            back.append(group)
        back += self.unstarted
        self._clear()
        for sample in flatten(back):
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
        if getattr(type(self.source), "add_samples", None) is RolloutDataSource.add_samples:  # the one without a buffer
            self.counts.lost = len(groups)
            name, other = type(self.source).__name__, "slime.rollout.data_source.RolloutDataSourceWithBuffer"
            logger.warning("%d groups are lost: %s has no buffer; set --data-source-path %s", len(groups), name, other)

    async def _cancel_all(self) -> None:
        tasks = [item.task for item in self.in_flight.values() if item.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _call_hooks(self) -> None:
        path = self.settings.sample_filter_path
        if path:
            load_function(path)(self.args, self.accepted)
        if self.settings.all_samples_path:
            self.judged.sort(key=_index)
            load_function(self.settings.all_samples_path)(self.args, self.judged, self.source)

    # --- reports -----------------------------------------------------------------------------

    def _report(self) -> None:
        progress.report("generate", len(self.accepted), self.target, **self.counts.numbers())

    def _deadline_report(self) -> str:
        waiting = [_index(item.original) for item in self.in_flight.values() if not item.done]
        return (
            f"rollout {self.rollout_id} was not done in {self.settings.timeout:g} s (--phase-timeout): "
            f"{len(self.accepted)} of {self.target} groups{self.counts.drop_report()}; "
            f"waiting for {len(waiting)} groups, "
            f"their first samples are {waiting[:8]}{' ...' if len(waiting) > 8 else ''}"
        )


def _error(item: _InFlightGroup) -> BaseException | None:
    task = item.task
    return None if task is None or not task.done() or task.cancelled() else task.exception()


def _packed(group: Group) -> Group:
    """The same group, its per-token fields as arrays: nobody has other names for its lists any more."""
    for sample in flatten(group):
        sample.pack()
    return group


def _tokens(group: Group) -> int:
    return sum(sample.response_length for sample in flatten(group))


def _index(group: Group) -> float:
    index = flatten(group)[0].index
    return float("inf") if index is None else index
