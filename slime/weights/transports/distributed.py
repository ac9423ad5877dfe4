"""Send weights to engines on any host, with one broadcast per bucket in a process group of a sender
and its engines.

Engines that cannot receive a bucket as one buffer get one broadcast per tensor.

The engines join the group with SGLang's ``/init_weights_update_group``, which makes torch's TCP
rendezvous with ``group_name`` as a prefix and calls ``_new_process_group_helper``. Here the same
keys are used with a separate backend object, so that torch's default group, its registry and its
communicators are not affected.

With NCCL, an engine that dies or hangs in the middle of a broadcast would block all members
forever. So the broadcast runs in its own thread. At the deadline, or when an engine reports an
error, only this communicator is aborted, the group is dropped, and the sync fails. The next sync
makes a new group with the engines that are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from slime.engines.handle import EngineHandle, Failures, on_each
from slime.engines.payload import Bucket, NamedTensor, by_element_size, flatten, layout
from slime.engines.process import address_towards
from slime.engines.sglang_api import Broadcast, EngineError
from slime.weights.transports.base import OpenWindow, SendResult, stream
from slime.weights.transports.peers import serve_store
from slime.weights.update import DEFAULT_BUCKET_BYTES, WeightUpdate

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroupGloo, ProcessGroupNCCL, Store


T = TypeVar("T")
# NCCL's watchdog would end this process; slime aborts the communicator itself instead
_NEVER = timedelta(days=1)


class Rendezvous:
    """The key-value store with which the members find each other. It listens on one address
    only.
    """

    def __init__(self, address: str, world_size: int, deadline: float) -> None:
        self.address = address
        self.world_size = world_size
        store = serve_store(address, 0, world_size, timedelta(seconds=deadline))
        self.store: Store | None = store
        self.port = store.port

    def release(self) -> None:
        """Stop listening, so that members that are still joining get an error."""
        self.store = None


class BroadcastGroup:
    """Sends tensors to all members. Every method blocks, so it must be called with
    :func:`in_thread`.

    Args:
        stall: With gloo, the time limit in seconds for sending one tensor.
    """

    def __init__(self, rendezvous: Rendezvous, name: str, backend: str, stall: float) -> None:
        from torch.distributed import PrefixStore

        self.name = name
        self.backend = backend
        device = "cuda" if backend == "nccl" else "cpu"
        store = rendezvous.store
        assert store is not None, "the rendezvous was released"
        for prefix in (name, f"{name}/", f"{device}/"):
            store = PrefixStore(prefix, store)
        make = _nccl if backend == "nccl" else _gloo
        # torch's stubs of the backends lack their collectives
        self._group: Any = make(store, rendezvous, stall)
        self._stream: torch.cuda.Stream | None = None

    def broadcast(self, tensors: Sequence[NamedTensor], flat: bool = False) -> None:
        """Send tensors in order, and return when all of them were sent. Errors of the backend
        propagate.

        Args:
            flat: Whether to send the bytes of all tensors in one broadcast, without gaps. Otherwise
                there is one broadcast per tensor.
        """
        import torch

        if self.backend != "nccl":
            self._launch(tensors, flat)
            return
        device = tensors[0][1].device
        with torch.cuda.device(device):
            self._stream = self._stream or torch.cuda.Stream(device)
            with torch.cuda.stream(self._stream):
                self._launch(tensors, flat)
            self._stream.synchronize()

    def _launch(self, tensors: Sequence[NamedTensor], flat: bool) -> None:
        import torch
        from torch.distributed import BroadcastOptions

        if flat:
            entries, size = layout(tensors, alignment=1)
            parts = [
                flatten(
                    tensors,
                    entries,
                    size,
                    torch.empty(size, dtype=torch.uint8, device=tensors[0][1].device),
                )
            ]
        else:
            parts = [tensor.detach().contiguous() for _, tensor in tensors]
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        works = [self._group.broadcast([part], options) for part in parts]
        for work in works:
            work.wait()

    def abort(self) -> None:
        """Abort the operations of this communicator only. Only NCCL has this; with gloo, ``stall``
        limits the time.
        """
        self._group.abort()

    def release(self) -> None:
        """Close the connections, so that members that still wait for a tensor get an error."""
        self._group = None


def _gloo(store: Store, rendezvous: Rendezvous, stall: float) -> ProcessGroupGloo:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=stall)
    # lazy_init must be as on the engines, whatever the trainer's own groups use: a group crashes if
    # its members differ.
    options._devices = [
        ProcessGroupGloo.create_device(hostname=rendezvous.address, lazy_init=False)
    ]
    return ProcessGroupGloo(store, 0, rendezvous.world_size, options)


def _nccl(store: Store, rendezvous: Rendezvous, stall: float) -> ProcessGroupNCCL:
    from torch.distributed import ProcessGroupNCCL

    # This must be as in SGLang. If two processes differ, one gets "invalid argument" at the first
    # broadcast.
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    return ProcessGroupNCCL(store, 0, rendezvous.world_size, options)


def in_thread(what: str, call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a blocking call in its own daemon thread, which does not delay the exit of the process if
    it hangs.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.done():
            outcome()

    def work() -> None:
        try:
            result = call()
        except Exception as error:
            # the frames would keep connections and buckets alive
            traceback.clear_frames(error.__traceback__)
            outcome = partial(future.set_exception, error)
        else:
            outcome = partial(future.set_result, result)
        # the loop is closed, so nobody waits for the result
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name=what, daemon=True).start()
    return future


NCCL_BUCKET_BYTES = 2 * DEFAULT_BUCKET_BYTES
"""On H200, sending 7.5 GiB to one engine takes 0.107 s with buckets of 512 MiB, 0.082 s with 1 GiB
and 0.062 s with 2 GiB. The default is not the fastest size, because sender and engines hold two or
three buckets in memory."""
GLOO_STALL_SECONDS = 30.0
GRACE_SECONDS = 10.0  # the time for engines to notice that the communicator is gone
PROBE_SECONDS = 5.0


class DistributedTransport:
    """Broadcasts weights with ``gloo`` or ``nccl``.

    Args:
        backend: The backend of the process group.
        deadline: The time limit in seconds for all engines to receive and load one bucket, or to
            join the group.
        grace: The time in seconds for engines to leave a broadcast that was aborted.
    """

    name = "distributed"
    bracketed = True

    def __init__(self, backend: str, deadline: float, grace: float = GRACE_SECONDS) -> None:
        self.backend = backend
        self.deadline = deadline
        self.grace = grace
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
        self,
        update: WeightUpdate,
        engines: Sequence[EngineHandle],
        open_window: OpenWindow | None = None,
    ) -> SendResult:
        result = SendResult()
        sending: asyncio.Task[Failures] | None = None
        ready = list(engines)
        try:
            # There is one broadcast at a time, because engines handle one weight request at a time.
            # Meanwhile the next bucket is gathered on the trainer's thread.
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

    async def _regrouped(
        self, ready: Sequence[EngineHandle], result: SendResult
    ) -> list[EngineHandle]:
        """Make a new group with the engines that are left, if some have failed since
        :meth:`connect`.
        """
        failed = await self.connect(ready) if ready else {}
        result.failed.update(failed)
        return [engine for engine in ready if engine.url not in failed]

    async def close(self) -> None:
        group = self._group
        members = list(self._members.values())
        self._group = None
        self._members = {}
        if group is not None:
            await self._leave(members, group.name)
            group.release()

    # --- one group ---------------------------------------------------------------------------

    async def _join(self, engines: Sequence[EngineHandle]) -> Failures:
        """Make a group with exactly these engines. If this fails, return the engines that caused
        the failure.
        """
        infos, failed = await on_each(
            engines, lambda engine: engine.info(), "report its version", self.deadline
        )
        if failed:
            return failed
        # The name is new for each group, because engines keep a group that they could not leave.
        self.groups_made += 1
        name = f"slime-weights-{self.groups_made}-{secrets.token_hex(4)}"
        # Rank 0 is this process. An engine has as many ranks as tensor-parallel processes.
        offsets: dict[str, int] = {}
        world_size = 1
        for engine in engines:
            offsets[engine.url] = world_size
            world_size += infos[engine.url].tensor_parallel_size
        address = address_towards([engine.url for engine in engines])
        rendezvous = Rendezvous(address, world_size, self.deadline)
        # Joining blocks until all members are there, so both sides must start before either is
        # awaited.
        ours = in_thread(
            "weights-join", lambda: BroadcastGroup(rendezvous, name, self.backend, self.stall)
        )
        calls = {
            e.url: e.init_group(
                address, rendezvous.port, offsets[e.url], world_size, name, self.backend
            )
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
        self._group = ours.result()
        self._members = {engine.url: engine for engine in engines}
        return {}

    async def _broadcast(
        self, bucket: Bucket, engines: Sequence[EngineHandle], version: str
    ) -> Failures:
        """Send one bucket to all engines, and return the engines that caused a failure."""
        group = self._group
        assert group is not None, "send() without connect()"
        flat = all(engine.capabilities.flat_broadcast for engine in engines)
        tensors = by_element_size(bucket.tensors)
        order = _describe(tensors, group.name, version, flat)
        calls = {engine.url: engine.receive(order) for engine in engines}
        sending = in_thread("weights-broadcast", lambda: group.broadcast(tensors, flat))

        async def give_up() -> None:
            self._group = None
            self._members = {}
            if self.backend == "nccl":
                await asyncio.wait([in_thread("weights-abort", group.abort)], timeout=self.grace)
            await asyncio.wait(
                [sending], timeout=self.grace if self.backend == "nccl" else self.stall + 1.0
            )
            group.release()

        what = f"the broadcast of bucket {bucket.index} of weights {version}"
        failed = await self._together(sending, calls, engines, what, give_up)
        if failed:
            await self._leave(
                [engine for engine in engines if engine.url not in failed], group.name
            )
        return failed

    async def _together(
        self,
        ours: asyncio.Future[T],
        calls: Mapping[str, Coroutine[object, None, None]],
        engines: Sequence[EngineHandle],
        what: str,
        give_up: Callable[[], Awaitable[None]],
    ) -> Failures:
        """Run the trainer's part and the engines' parts of an operation that needs all of them, and
        return failures.

        On the first error, or at the deadline, ``give_up`` ends the part of the trainer. This
        releases the engines that work correctly. The engines that then do not answer, or are still
        in the operation, caused the failure. If there are none, the engines that had reported an
        error caused it. With gloo, an engine that has received a part of a tensor also stays in the
        operation, because gloo does not wake such a receiver when its connection closes.

        Args:
            ours: The part of the trainer.
            calls: The part of each engine, by URL.
        """
        theirs: dict[str, asyncio.Future[None]] = {
            url: asyncio.ensure_future(call) for url, call in calls.items()
        }
        everything: list[asyncio.Future[T] | asyncio.Future[None]] = [ours, *theirs.values()]
        # FIRST_EXCEPTION, because when one part fails, the others would wait for it until the
        # deadline.
        _, late = await asyncio.wait(
            everything, timeout=self.deadline, return_when=asyncio.FIRST_EXCEPTION
        )
        if not late and not any(future.exception() for future in everything):
            return {}
        # Recorded before give_up(), which causes errors on engines that worked correctly until
        # then.
        refused = {url: error for url, future in theirs.items() if (error := _error(future))}
        await give_up()
        _, stuck = await asyncio.wait(theirs.values(), timeout=self.grace)
        for future in everything:
            future.cancel()
            future.add_done_callback(_ignore)
        _, failed = await on_each(
            engines, lambda engine: engine.info(), f"answer after {what}", self.probe
        )
        for url, future in theirs.items():
            if future in stuck:
                failed.setdefault(url, EngineError(f"{url} is stuck in {what}"))
        failed = failed or refused
        if not failed:
            raise RuntimeError(f"{what} failed on the trainer, not on the engines") from _error(
                ours
            )
        return {url: refused.get(url, error) for url, error in failed.items()}

    async def _leave(self, engines: Sequence[EngineHandle], name: str) -> None:
        """Let engines leave the group. Errors are ignored, because an engine may not know the
        group.
        """
        await on_each(
            engines, lambda engine: engine.destroy_group(name), "leave the group", self.probe
        )


def _describe(tensors: Sequence[NamedTensor], group: str, version: str, flat: bool) -> Broadcast:
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
    names = [name for name, _ in tensors]
    shapes = [list(tensor.shape) for _, tensor in tensors]
    return Broadcast(names, dtypes, shapes, group, version, flat)


def _error(future: asyncio.Future[T]) -> Exception | None:
    """Return the error with which a future has ended, or None."""
    error = future.exception() if future.done() and not future.cancelled() else None
    return error if isinstance(error, Exception) else None


def _ignore(future: asyncio.Future[T]) -> None:
    """Retrieve the error of a future for which nobody waits any more, so that asyncio does not
    report it.
    """
    if not future.cancelled():
        future.exception()
