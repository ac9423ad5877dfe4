"""The actor of one rollout worker: it generates and scores groups that the rollout manager hands
out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slime.cluster.actors import ActorProcess, door
from slime.cluster.generation import GarbageCollection
from slime.config.machine import raise_file_limit
from slime.engines.background import background_loop
from slime.engines.http import init_http_client, take_retries, watch_faults
from slime.engines.keys import ServerKeys, send_keys
from slime.engines.process import exempt_from_proxy
from slime.observability.files import take_warnings
from slime.rollout.group import generate_and_rm_group
from slime.rollout.loop import packed
from slime.rollout.state import GenerateState
from slime.rollout.weight_timeline import TIMELINE, RequestLog

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.data.sample import Group
    from slime.rollout.schedule_file import ScheduleLine
    from slime.types import SamplingParams

T = TypeVar("T")
REPORT_SECONDS = 5.0
"""A worker without a fault answers :meth:`RolloutWorker.report` after this time."""


@dataclass(frozen=True)
class GroupCall:
    """One group to generate and score.

    Attributes:
        number: The number of this call.
        rollout_id, eval_rollout_id, aborted: See :class:`~slime.rollout.state.GenerateState`.
        keeps_kv: Whether requests keep their KV cache through a weight update; None: no schedule is
            recorded.
    """

    number: int
    group: Group
    params: SamplingParams
    evaluation: bool
    purpose: str
    rollout_id: int | None
    eval_rollout_id: int | None
    aborted: bool
    keeps_kv: bool | None


@dataclass(frozen=True)
class GroupResult:
    """A group that was generated and scored, or aborted, and the lines of its requests for the
    schedule.
    """

    group: Group
    lines: list[ScheduleLine] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """What happened in a worker since its last report.

    Attributes:
        fault: Whether an engine failed a request.
        retries: Number of requests that were sent again.
    """

    fault: bool
    retries: int
    warnings: list[str]


class RolloutWorker:
    """One rollout worker.

    Groups are generated on the background event loop of the process, where user functions find it.
    The methods run on the event loop of the actor, so that they answer even if a user function
    blocks the other one.

    Args:
        args: With the address of the engines of this worker.
        share: The share of the run's requests in flight that this worker may send.
        keys: The keys of engines and routers, see :func:`slime.engines.keys.known_keys`.
    """

    def __init__(
        self, args: Args, index: int, log_dir: str, share: float, keys: Mapping[str, ServerKeys]
    ) -> None:
        door().log_to(Path(log_dir), f"rollout-worker-{index}")
        os.environ.update(exempt_from_proxy(door().address()))
        raise_file_limit()
        send_keys(keys)
        init_http_client(args)
        self.args = args
        self.state = GenerateState(args)
        self.state.share = share
        self.garbage = GarbageCollection()
        # by the number of the call; only used on the background loop
        self._tasks: dict[int, asyncio.Task[object]] = {}
        self._rollout_id: int | None = None
        self._fault = False
        watch_faults(self._note_fault)

    def _note_fault(self) -> None:
        self._fault = True

    async def process(self) -> ActorProcess:
        """Return the process of this worker; the first answer means that it has started."""
        return door().own_process()

    async def generate(self, call: GroupCall) -> GroupResult:
        """Generate and score a group, with the rollout function's hooks for a single sample."""
        return await _on_background_loop(self._generate(call))

    async def _generate(self, call: GroupCall) -> GroupResult:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[call.number] = task
        try:
            self._take_state(call)
            lines: list[ScheduleLine] = []
            if call.keeps_kv is not None:
                TIMELINE.set(RequestLog(call.keeps_kv, lines.append))
            group = await generate_and_rm_group(
                self.args, call.group, call.params, call.evaluation, call.purpose
            )
            return GroupResult(packed(group), lines)
        finally:
            del self._tasks[call.number]

    def _take_state(self, call: GroupCall) -> None:
        state = self.state
        state.rollout_id = call.rollout_id
        state.eval_rollout_id = call.eval_rollout_id
        state.aborted = call.aborted
        if call.rollout_id != self._rollout_id:
            self._rollout_id = call.rollout_id
            self.garbage.collect()

    async def abort(self) -> None:
        """Let groups in progress end without further requests, see :meth:`GroupGenerator.abort`."""
        self.state.aborted = True

    async def cancel(self, number: int) -> None:
        """Cancel a call, and return when it has ended, so that it sends no more requests."""

        async def end() -> None:
            task = self._tasks.get(number)
            if task is not None:
                task.cancel()
                await asyncio.wait([task])

        await _on_background_loop(end())

    async def report(self, keys: Mapping[str, ServerKeys]) -> Report:
        """Wait until an engine has failed a request, but at most :data:`REPORT_SECONDS`.

        Args:
            keys: The keys of engines and routers; a restarted engine has a new address.
        """
        send_keys(keys)
        for _ in range(round(REPORT_SECONDS / 0.1)):
            if self._fault:
                break
            await asyncio.sleep(0.1)
        fault = self._fault
        self._fault = False
        return Report(fault, take_retries(), take_warnings())


async def _on_background_loop(work: Coroutine[object, None, T]) -> T:
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, background_loop()))
