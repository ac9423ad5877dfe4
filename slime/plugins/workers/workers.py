"""The rollout workers of a run, in the process of the rollout manager: which one gets a group, and
which are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.cluster.actors import (
    ActorError,
    ActorHandle,
    ActorLost,
    ActorProcess,
    NotEnded,
    Ref,
    Supervised,
    door,
)
from slime.cluster.placement import thread_environment
from slime.config.hooks import load_function
from slime.data.sample import Group, flatten
from slime.data.token_fields import TOKEN_FIELDS, Packed
from slime.engines import http
from slime.engines.background import run
from slime.engines.keys import known_keys
from slime.observability.files import warn
from slime.plugins.workers.worker import (
    REPORT_SECONDS,
    GroupCall,
    GroupResult,
    Report,
    RolloutWorker,
)
from slime.rollout.state import GenerateState
from slime.rollout.verifier.pool import default_workers

if TYPE_CHECKING:
    from slime.cluster.engine_fleet import EngineFleet
    from slime.config.args import Args
    from slime.types import SamplingParams

logger = logging.getLogger(__name__)
SILENT_SECONDS = 60.0  # a worker whose report is this late is lost
KILL_SECONDS = 30.0
STOP_SECONDS = 10.0  # for groups of a worker to end
MOST_CALLS = 1_000_000  # of one worker at a time
MOST_TRIES = 4  # workers that may be lost while they generate the same group


class WorkersLost(RuntimeError):
    """The run cannot continue without its rollout workers; the message says why they were lost."""


@dataclass
class _Worker(Supervised):
    """One position; a restarted worker keeps it.

    Attributes:
        handle, process: None while the worker is being started.
        part: The part of the engines that it uses, above 0 and at most 1.
        samples: Number of samples of the groups that it has.
    """

    index: int
    part: float
    handle: ActorHandle | None = None
    process: ActorProcess | None = None
    samples: int = 0


class RolloutWorkers:
    """Generates groups in rollout workers; a :class:`~slime.rollout.group.GroupGenerator`.

    A group goes to the worker that has the fewest samples for its part of the engines. If a worker
    is lost, its groups are generated again by others, from the state in which they were handed out,
    and the worker is started again. All methods but :meth:`start`, :meth:`stop`, :meth:`pids` and
    :meth:`restarts` run on the event loop of the rollout.

    Args:
        launch: Starts the actor of the worker with the given index and returns at once.
        parts: The part of the engines that each worker uses.
        start_seconds: How long a worker may take to start.
        on_fault: Called when an engine has failed a request of a worker.
    """

    def __init__(
        self,
        launch: Callable[[int], ActorHandle],
        parts: Sequence[float],
        start_seconds: float,
        on_fault: Callable[[], None],
    ) -> None:
        self._launch = launch
        self._start_seconds = start_seconds
        self._on_fault = on_fault
        self._workers = [_Worker(index, part) for index, part in enumerate(parts)]
        self._numbers = itertools.count()
        self._changed = asyncio.Event()  # set when a worker has started, or when none will
        self._tasks: set[asyncio.Task[None]] = set()
        self._fatal: str | None = None
        self._restarts = 0

    def start(self) -> None:
        """Start all workers at the same time, and wait for them. The first failure propagates."""

        async def all_of_them() -> None:
            await asyncio.gather(*map(self._begin, self._workers))

        run(all_of_them())

    def stop(self) -> None:
        """End all workers. Groups in progress fail."""

        async def end() -> None:
            self._fatal = self._fatal or "the rollout workers were stopped"
            self._changed.set()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*(self._end(worker) for worker in self._workers))

        run(end())

    def pids(self) -> list[int]:
        """The process ids of the workers that are ready, each on its node."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def restarts(self) -> float:
        """Number of workers that were started again since the last call."""
        count = self._restarts
        self._restarts = 0
        return float(count)

    # --- groups ------------------------------------------------------------------------------

    async def generate(
        self,
        state: GenerateState,
        group: Group,
        params: SamplingParams,
        evaluation: bool = False,
        purpose: str = "sampling",
    ) -> Group:
        """See :meth:`~slime.rollout.group.GroupGenerator.generate`; ``group`` itself does not
        change.

        Raises:
            WorkersLost: :data:`MOST_TRIES` workers were lost while they generated this group, or a
                worker was lost too often.
        """
        for _ in range(MOST_TRIES):
            worker = await self._least_loaded()
            handle = worker.handle
            assert handle is not None
            schedule = None if evaluation else state.schedule
            call = GroupCall(
                next(self._numbers), group, params, evaluation, purpose,
                state.rollout_id, state.eval_rollout_id, state.aborted,
                keeps_kv=None if schedule is None else schedule.keeps_kv,
            )  # fmt: skip
            try:
                result = await self._ask(worker, handle, call)
            except ActorLost as error:
                await self._lost(worker, handle, str(error))
                continue
            if schedule is not None:
                for line in result.lines:
                    schedule.file.append(line)
            return _owned(result.group)
        index = flatten(group)[0].index
        raise WorkersLost(
            f"{MOST_TRIES} rollout workers were lost while they generated the group of sample "
            f"{index}: see their logs, logs/rollout-worker-*.log; a function of the user may need "
            "too much memory or crash the process"
        )

    async def _ask(self, worker: _Worker, handle: ActorHandle, call: GroupCall) -> GroupResult:
        size = len(call.group)
        worker.samples += size
        try:
            return await door().result(handle.generate.remote(call))
        except asyncio.CancelledError:
            # Like a cancelled task of this process, the call must have ended when this returns: its
            # requests would meet engines whose weights or memory change.
            await asyncio.wait(
                [asyncio.ensure_future(_quiet(handle.cancel.remote(call.number)))],
                timeout=STOP_SECONDS,
            )
            raise
        finally:
            if worker.handle is handle:
                worker.samples -= size

    async def abort(self) -> None:
        """See :meth:`~slime.rollout.group.GroupGenerator.abort`."""
        handles = [worker.handle for worker in self._workers if worker.handle is not None]
        # a worker that is lost does not answer: its groups end when the loss is noticed
        if handles:
            await asyncio.wait(
                [asyncio.ensure_future(_quiet(handle.abort.remote())) for handle in handles],
                timeout=STOP_SECONDS,
            )

    async def _least_loaded(self) -> _Worker:
        while True:
            if self._fatal is not None:
                raise WorkersLost(self._fatal)
            ready = [worker for worker in self._workers if worker.handle is not None]
            if ready:
                return min(ready, key=lambda worker: worker.samples / worker.part)
            self._changed.clear()
            await self._changed.wait()

    # --- workers -----------------------------------------------------------------------------

    async def _begin(self, worker: _Worker) -> None:
        """Start a worker, and watch it from then on.

        Raises:
            ActorLost: It could not be started.
            TimeoutError: It did not answer within ``start_seconds``.
        """
        handle = self._launch(worker.index)
        try:
            async with asyncio.timeout(self._start_seconds):
                worker.process = await door().result(handle.process.remote())
        except BaseException:
            door().kill(handle)
            raise
        worker.handle = handle
        worker.samples = 0
        self._changed.set()
        self._spawn(self._watch(worker, handle))

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, worker: _Worker, handle: ActorHandle) -> None:
        """Take a worker's reports until it is lost."""
        while worker.handle is handle:
            answer = asyncio.ensure_future(door().result(handle.report.remote(known_keys())))
            try:
                # In two parts: if something blocked this loop for long, the first one expires, and
                # the answer arrives in the second.
                done, _ = await asyncio.wait([answer], timeout=SILENT_SECONDS)
                if not done:
                    done, _ = await asyncio.wait([answer], timeout=REPORT_SECONDS)
                report: Report | None = answer.result() if done else None
            except ActorError as error:
                await self._lost(worker, handle, str(error))
                return
            finally:
                answer.cancel()
            if report is None:
                await self._lost(worker, handle, f"it did not answer for {SILENT_SECONDS:.0f} s")
                return
            http.add_retries(report.retries)
            for warning in report.warnings:
                warn(f"rollout worker {worker.index}: {warning}")
            if report.fault:
                self._on_fault()

    async def _lost(self, worker: _Worker, handle: ActorHandle, why: str) -> None:
        """Note that a worker is lost, unless that is known already, end its process, and start it
        again.
        """
        if worker.handle is not handle or self._fatal is not None:
            return
        logger.error("rollout worker %d is lost: %s", worker.index, why)
        worker.handle = None
        worker.note_loss(why)
        self._spawn(self._restart(worker, handle))

    async def _restart(self, worker: _Worker, lost: ActorHandle) -> None:
        await self._end(worker, lost)
        while not worker.hopeless:
            try:
                await self._begin(worker)
            except Exception as error:  # Whatever the reason was, the next attempt may succeed.
                logger.error(
                    "rollout worker %d could not be started again: %s", worker.index, error
                )
                worker.note_loss(str(error))
                continue
            self._restarts += 1
            warn(
                f"rollout worker {worker.index} was lost and started again; its groups are "
                "generated again"
            )
            return
        self._fatal = (
            f"rollout worker {worker.index} was lost {worker.how_often}, see "
            f"logs/rollout-worker-{worker.index}.log; the last time: {worker.last_words}"
        )
        self._changed.set()

    async def _end(self, worker: _Worker, lost: ActorHandle | None = None) -> None:
        """End a worker's process, also if it is stopped (SIGSTOP), so that it sends no more
        requests.
        """
        process = worker.process
        handle = lost or worker.handle
        worker.handle = worker.process = None
        if handle is not None:
            door().kill(handle)
        if process is not None:
            try:
                await asyncio.to_thread(door().end_processes, [process], KILL_SECONDS)
            except (NotEnded, ActorError) as error:  # for example, its node is gone
                logger.error("rollout worker %d: %s", worker.index, error)


def parts_of_workers(workers: int, shares: int, engines: int) -> list[float]:
    """Return the part of the engines that each rollout worker uses; they add up to 1.

    Args:
        workers: Number of workers; with more workers than shares, several use the same one.
        shares: Number of shares, each with every ``shares``-th engine; 0: the engines are not
            divided.
        engines: Number of engines.
    """
    if not shares:
        return [1 / workers] * workers
    users = [len(range(share, workers, shares)) for share in range(shares)]
    sizes = [len(range(share, engines, shares)) for share in range(shares)]
    return [sizes[worker % shares] / engines / users[worker % shares] for worker in range(workers)]


def start(args: Args, fleet: EngineFleet) -> RolloutWorkers:
    """Start the workers of a run, each with the address of its share of the engines.

    Workers are spread over the nodes of the cluster. Each has its part of the verifier processes of
    its node.
    """
    # Objects of classes of the hooks' files come back with samples; they are found only if the
    # files are loaded here.
    hooks = [
        (args.custom_generate_function_path, "custom_generate"),
        (args.custom_rm_path, "CustomRewardModel"),
    ]
    for path, name in (*hooks, *((hook, None) for hook in args.rollout_sample_hook_path)):
        if path:
            load_function(path, name)
    count = args.rollout_workers
    parts = parts_of_workers(count, fleet.shares, len(fleet.engines))
    verifiers_of_node = default_workers() / math.ceil(count / door().nodes())
    verifiers = math.ceil(args.reward_workers / count if args.reward_workers else verifiers_of_node)
    environment = thread_environment(args.threads_per_process)

    def launch(index: int) -> ActorHandle:
        own = args.with_values(reward_workers=verifiers, **fleet.addresses_of(index))
        arguments = own, index, str(fleet.log_dir), parts[index], known_keys()
        # Groups wait in the worker for the requests before them, not for a place among the calls
        # of the actor.
        return door().create(
            RolloutWorker, *arguments, environment=environment, threads=MOST_CALLS, spread=True
        )

    workers = RolloutWorkers(launch, parts, args.start_timeout, fleet.monitor.wake)
    workers.start()
    return workers


async def _quiet(ref: Ref[Any]) -> None:
    """Wait for a call that fails only if its worker is lost, which is noticed elsewhere."""
    with contextlib.suppress(Exception):
        await door().result(ref)


def _owned(group: Group) -> Group:
    """Copy the arrays of a group that came through the object store, in place, and return it.

    Until then, they are read-only and keep the whole group in the object store.
    """
    for sample in flatten(group):
        fields = vars(sample)
        for name, value in fields.items():
            if name in TOKEN_FIELDS and isinstance(value, Packed):
                fields[name] = Packed(np.array(value.values))
            elif isinstance(value, np.ndarray):
                fields[name] = np.array(value)
    return group
