"""Send weights to engines on any host, with one broadcast per bucket in a process group of a sender and its engines.

Engines that cannot receive a bucket as one buffer get one broadcast per tensor.

With NCCL, an engine that dies or hangs in the middle of a broadcast would block all members forever. So the broadcast
runs in its own thread. At the deadline, or when an engine reports an error, only this communicator is aborted, the
group is dropped, and the sync fails. The next sync makes a new group with the engines that are left.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TypeVar

from slime.engines.handle import EngineHandle, Failures, on_each
from slime.engines.payload import Bucket, NamedTensor, by_element_size
from slime.engines.process import address_towards
from slime.engines.sglang_api import Broadcast, EngineError
from slime.weights.transports.base import OpenWindow, SendResult, stream
from slime.weights.transports.group import BroadcastGroup, Rendezvous, in_thread
from slime.weights.update import DEFAULT_BUCKET_BYTES, WeightUpdate

NCCL_BUCKET_BYTES = 2 * DEFAULT_BUCKET_BYTES
"""On H200, sending 7.5 GiB to one engine takes 0.107 s with buckets of 512 MiB, 0.082 s with 1 GiB and 0.062 s with
2 GiB. The default is not the fastest size, because sender and engines hold two or three buckets in memory."""
T = TypeVar("T")
GLOO_STALL_SECONDS = 30.0
GRACE_SECONDS = 10.0  # the time for engines to notice that the communicator is gone
PROBE_SECONDS = 5.0


class DistributedTransport:
    """Broadcasts weights with ``gloo`` or ``nccl``.

    Args:
        backend: The backend of the process group.
        deadline: The time limit in seconds for all engines to receive and load one bucket, or to join the group.
        grace: The time in seconds for engines to leave a broadcast that was aborted.
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
        self.groups_made = 0

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
            # There is one broadcast at a time, because engines handle one weight request at a time. Meanwhile the next
            # bucket is gathered on the trainer's thread.
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
        """Make a new group with the engines that are left, if some have failed since :meth:`connect`."""
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
        """Make a group with exactly these engines. If this fails, return the engines that caused the failure."""
        infos, failed = await on_each(engines, lambda engine: engine.info(), "report its version", self.deadline)
        if failed:
            return failed
        self.groups_made += 1
        name = f"slime-weights-{self.groups_made}-{secrets.token_hex(4)}"
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
        """Send one bucket to all engines, and return the engines that caused a failure."""
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
        """Run the trainer's part and the engines' parts of an operation that needs all of them, and return failures.

        On the first error, or at the deadline, ``give_up`` ends the part of the trainer. This releases the engines
        that work correctly. The engines that then do not answer, or are still in the operation, caused the failure. If
        there are none, the engines that had reported an error caused it. With gloo, an engine that has received a part
        of a tensor also stays in the operation, because gloo does not wake such a receiver when its connection closes.

        Args:
            ours: The part of the trainer.
            calls: The part of each engine, by URL.
        """
        theirs: dict[str, asyncio.Future[None]] = {url: asyncio.ensure_future(call) for url, call in calls.items()}
        everything: list[asyncio.Future[T] | asyncio.Future[None]] = [ours, *theirs.values()]
        # FIRST_EXCEPTION, because when one part fails, the others would wait for it until the deadline.
        _, late = await asyncio.wait(everything, timeout=self.deadline, return_when=asyncio.FIRST_EXCEPTION)
        if not late and not any(future.exception() for future in everything):
            return {}
        # Recorded before give_up(), which causes errors on engines that worked correctly until then.
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
            raise RuntimeError(f"{what} failed on the trainer, not on the engines") from _error(ours)
        return {url: refused.get(url, error) for url, error in failed.items()}

    async def _leave(self, engines: Sequence[EngineHandle], name: str) -> None:
        """Let engines leave the group. Errors are ignored, because an engine may not know the group."""
        await on_each(engines, lambda engine: engine.destroy_group(name), "leave the group", self.probe)


def _describe(tensors: Sequence[NamedTensor], group: str, version: str, flat: bool) -> Broadcast:
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
    names, shapes = [name for name, _ in tensors], [list(tensor.shape) for _, tensor in tensors]
    return Broadcast(names, dtypes, shapes, group, version, flat)


def _error(future: asyncio.Future[T]) -> Exception | None:
    """Return the error with which a future has ended, or None."""
    error = future.exception() if future.done() and not future.cancelled() else None
    return error if isinstance(error, Exception) else None


def _ignore(future: asyncio.Future[T]) -> None:
    """Retrieve the error of a future for which nobody waits any more, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()
