"""Engines anywhere: one broadcast per bucket over a process group of the sender and its engines.

Engines that cannot take a bucket as one buffer get one broadcast per tensor.

An engine that dies or hangs in the middle of a broadcast would hold everybody up for ever under NCCL.
So the broadcast runs in a watched thread. At the deadline, or when an engine reports an error, only that
communicator is aborted, the group is forgotten, and the sync counts as failed; the next one makes a new
group with whoever is there.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TypeVar

from slime.engines.fan_out import Failures, on_each
from slime.engines.flat import Bucket, NamedTensor, by_element_size
from slime.engines.handle import EngineHandle
from slime.engines.process import address_towards
from slime.engines.sglang_api import Broadcast, EngineError
from slime.weights.transports.base import OpenWindow, SendResult, stream
from slime.weights.transports.group import BroadcastGroup, Rendezvous, in_thread
from slime.weights.update import DEFAULT_BUCKET_BYTES, WeightUpdate

NCCL_BUCKET_BYTES = 2 * DEFAULT_BUCKET_BYTES
"""On H200, 7.5 GiB to one engine: 0.107 s in buckets of 512 MiB, 0.082 s of 1 GiB, 0.062 s of 2 GiB. Sender and engines
hold two or three buckets, so the default is not the fastest."""
T = TypeVar("T")
GLOO_STALL_SECONDS = 30.0
GRACE_SECONDS = 10.0  # for engines to notice that the communicator is gone
PROBE_SECONDS = 5.0


class DistributedTransport:
    """Broadcasts over ``gloo`` or ``nccl``.

    Args:
        backend: of the process group.
        deadline: seconds that all engines have to receive and load one bucket, or to join the group.
        grace: seconds that engines have to leave a broadcast that was aborted.
    """

    name = "distributed"
    bracketed = True

    def __init__(self, backend: str, deadline: float, grace: float = GRACE_SECONDS) -> None:
        self.backend, self.deadline, self.grace = backend, deadline, grace
        self.bucket_bytes = NCCL_BUCKET_BYTES if backend == "nccl" else DEFAULT_BUCKET_BYTES
        self.stall = min(GLOO_STALL_SECONDS, deadline)
        self.probe = min(PROBE_SECONDS, grace)
        self._group: BroadcastGroup | None = None
        self._members: dict[str, EngineHandle] = {}
        self._groups_made = 0

    async def connect(self, engines: Sequence[EngineHandle]) -> Failures:
        if self._group is not None and list(self._members) == [engine.url for engine in engines]:
            self._members = {engine.url: engine for engine in engines}
            return {}
        await self.close()
        failed: Failures = {}
        alive = list(engines)
        while alive:
            dropped = await self._join(alive)
            if not dropped:
                break
            failed.update(dropped)
            alive = [engine for engine in alive if engine.url not in dropped]
        return failed

    async def send(
        self, update: WeightUpdate, engines: Sequence[EngineHandle], open_window: OpenWindow | None = None
    ) -> SendResult:
        result = SendResult()
        sending: asyncio.Task[Failures] | None = None
        ready = list(engines)
        try:
            # One broadcast at a time: engines serve one weight request after the other. The next bucket is gathered
            # meanwhile, on the trainer's thread.
            async for bucket in stream(update.buckets):
                if sending is None and open_window is not None:
                    ready = await self._regrouped(await open_window(), result)
                if sending is not None and await sending:
                    break
                if not ready:
                    break
                result.count(bucket)
                sending = asyncio.create_task(self._broadcast(bucket, ready, update.version))
        finally:
            failed = await sending if sending is not None else {}
        result.failed.update(failed)
        result.torn = [engine.url for engine in ready if failed and engine.url not in failed]
        return result

    async def _regrouped(self, ready: Sequence[EngineHandle], result: SendResult) -> list[EngineHandle]:
        """Engines may have dropped out since :meth:`connect`; then those that are left form a new group."""
        failed = await self.connect(ready) if ready else {}
        result.failed.update(failed)
        return [engine for engine in ready if engine.url not in failed]

    async def close(self) -> None:
        group, members = self._group, list(self._members.values())
        self._group, self._members = None, {}
        if group is not None:
            await self._leave(members, group.name)
            group.release()

    # --- one group ---------------------------------------------------------------------------

    async def _join(self, engines: Sequence[EngineHandle]) -> Failures:
        """Make a group with exactly these engines. On failure there is none, and the culprits are returned."""
        infos, failed = await on_each(engines, lambda engine: engine.info(), "say what it is", self.deadline)
        if failed:
            return failed
        self._groups_made += 1
        name = f"slime-weights-{self._groups_made}-{secrets.token_hex(4)}"
        offsets, world_size = {}, 1
        for engine in engines:
            offsets[engine.url] = world_size
            world_size += infos[engine.url].tensor_parallel_size
        address = address_towards([engine.url for engine in engines])
        rendezvous = Rendezvous(address, world_size, self.deadline)
        ours = in_thread("weights-join", lambda: BroadcastGroup(rendezvous, name, self.backend, self.stall))
        calls = {
            e.url: e.init_group(address, rendezvous.port, offsets[e.url], world_size, name, self.backend)
            for e in engines
        }

        async def give_up() -> None:
            await asyncio.wait([ours], timeout=self.stall + 1.0)
            rendezvous.release()
            if ours.done() and _error(ours) is None:
                ours.result().release()

        failed = await self._together(ours, calls, engines, f"joining group {name}", give_up)
        if failed:
            await self._leave([engine for engine in engines if engine.url not in failed], name)
            return failed
        self._group, self._members = ours.result(), {engine.url: engine for engine in engines}
        return {}

    async def _broadcast(self, bucket: Bucket, engines: Sequence[EngineHandle], version: str) -> Failures:
        """Send one bucket to all engines; returns the engines that caused a failure."""
        group = self._group
        assert group is not None, "send() without connect()"
        flat = all(engine.capabilities.flat_broadcast for engine in engines)
        tensors = by_element_size(bucket.tensors)
        order = _describe(tensors, group.name, version, flat)
        calls = {engine.url: engine.receive(order) for engine in engines}
        sending = in_thread("weights-broadcast", lambda: group.broadcast(tensors, flat))

        async def give_up() -> None:
            self._group, self._members = None, {}
            if self.backend == "nccl":
                await asyncio.wait([in_thread("weights-abort", group.abort)], timeout=self.grace)
            await asyncio.wait([sending], timeout=self.grace if self.backend == "nccl" else self.stall + 1.0)
            group.release()

        what = f"the broadcast of bucket {bucket.index} of weights {version}"
        failed = await self._together(sending, calls, engines, what, give_up)
        if failed:
            await self._leave([engine for engine in engines if engine.url not in failed], group.name)
        return failed

    async def _together(
        self,
        ours: asyncio.Future[T],
        calls: Mapping[str, Coroutine[object, None, None]],
        engines: Sequence[EngineHandle],
        what: str,
        give_up: Callable[[], Awaitable[None]],
    ) -> Failures:
        """The trainer's half and the engines' halves of something that needs all of them.

        On the first error, or at the deadline, ``give_up`` ends the trainer's half; that frees engines that
        are well. To blame is who then does not answer, or is still stuck; if nobody is, who refused. Stuck is
        also who had received a part of a tensor: gloo does not wake a receiver whose connection closes there.
        """
        theirs: dict[str, asyncio.Future[None]] = {url: asyncio.ensure_future(call) for url, call in calls.items()}
        everything: list[asyncio.Future[T] | asyncio.Future[None]] = [ours, *theirs.values()]
        # FIRST_EXCEPTION: when one side fails, the other would wait for it up to the deadline.
        _, late = await asyncio.wait(everything, timeout=self.deadline, return_when=asyncio.FIRST_EXCEPTION)
        if not late and not any(future.exception() for future in everything):
            return {}
        # Noted before giving up, which makes engines fail that were well until then.
        refused = {url: error for url, future in theirs.items() if (error := _error(future))}
        await give_up()
        _, stuck = await asyncio.wait(theirs.values(), timeout=self.grace)
        for future in everything:
            future.cancel()
            future.add_done_callback(_ignore)
        _, failed = await on_each(engines, lambda engine: engine.info(), f"answer after {what}", self.probe)
        for url, future in theirs.items():
            if future in stuck:
                failed.setdefault(url, EngineError(f"{url} is stuck in {what}"))
        failed = failed or refused
        if not failed:
            raise RuntimeError(f"{what} failed on the trainer, all engines are well") from _error(ours)
        return {url: refused.get(url, error) for url, error in failed.items()}

    async def _leave(self, engines: Sequence[EngineHandle], name: str) -> None:
        """Let engines leave the group. It is no error when they do not know it."""
        await on_each(engines, lambda engine: engine.destroy_group(name), "leave the group", self.probe)


def _describe(tensors: Sequence[NamedTensor], group: str, version: str, flat: bool) -> Broadcast:
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
    names, shapes = [name for name, _ in tensors], [list(tensor.shape) for _, tensor in tensors]
    return Broadcast(names, dtypes, shapes, group, version, flat)


def _error(future: asyncio.Future[T]) -> Exception | None:
    """The error of a future that has ended with one."""
    error = future.exception() if future.done() and not future.cancelled() else None
    return error if isinstance(error, Exception) else None


def _ignore(future: asyncio.Future[T]) -> None:
    """Nobody waits for this any more: take note of its error, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()
