"""Send weights to engines on the same host, by shared memory on the CPU and by CUDA IPC on the GPU.

Each bucket is copied once into one flat buffer, and its name or handle is sent instead of its
values. The buffer is kept until every engine has answered. While engines load one bucket, the next
is copied, so there are at most two buffers of ``--update-weight-buffer-size``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.engines.handle import EngineHandle, Failures, on_each
from slime.engines.payload import Bucket, entry, flatten, layout
from slime.weights.transports.base import OpenWindow, SendResult, stream
from slime.weights.transports.peers import PeerLink, contribute
from slime.weights.transports.shared_memory import (
    Buffer,
    FileList,
    Leftover,
    allocate,
    sweep_shared_memory,
)
from slime.weights.update import DEFAULT_BUCKET_BYTES, WeightUpdate

if TYPE_CHECKING:
    import torch


@dataclass
class Staged:
    """A bucket whose tensors are views into a buffer."""

    bucket: Bucket
    buffer: Buffer | None

    def drop(self) -> Buffer:
        """Release the buffer, even if something still references the bucket (for example a
        traceback).
        """
        self.bucket.tensors.clear()
        self.bucket.flat = None
        buffer = self.buffer
        self.buffer = None
        assert buffer is not None
        return buffer


class IpcTransport:
    """Sends buckets by handle; see the module.

    Args:
        deadline: The time limit in seconds for an engine to load one bucket.
        same_process: Whether the only engine is in this process, which needs no shared memory.
    """

    name = "ipc"
    bracketed = True
    bucket_bytes = DEFAULT_BUCKET_BYTES

    def __init__(self, deadline: float, same_process: bool = False) -> None:
        self.deadline = deadline
        self.same_process = same_process
        self.files: FileList | None = None
        # shared memory to use again: its first use takes ten times as long as the copy
        self.spare: list[Buffer] = []
        self.leftovers: list[Leftover] = []

    async def connect(self, engines: Sequence[EngineHandle]) -> Failures:
        self._prepare()
        return {}

    def _prepare(self) -> None:
        import torch.multiprocessing

        if self.same_process:
            return
        # With the other strategy, pickling a tensor passes a file descriptor, and SGLang's server
        # fails on it.
        torch.multiprocessing.set_sharing_strategy("file_system")
        self.files = self.files or FileList()
        self._sweep()

    async def send(
        self,
        update: WeightUpdate,
        engines: Sequence[EngineHandle],
        open_window: OpenWindow | None = None,
    ) -> SendResult:
        result = SendResult()
        alive = list(engines)
        loading: asyncio.Task[Failures] | None = None
        try:
            # Three steps overlap: the trainer's thread gathers bucket n + 2, this loop stages
            # bucket n + 1, and the engines load bucket n. The window opens only after the first
            # bucket is staged, so that engines are not paused while the trainer gathers it.
            async for bucket in stream(update.buckets):
                staged = await asyncio.to_thread(stage, bucket, self.spare, self.files)
                if loading is None and open_window is not None:
                    alive = list(await open_window())
                if loading is not None:
                    alive = _without(alive, await loading, result)
                result.count(staged.bucket)
                loading = asyncio.create_task(self.push_staged(staged, alive, update))
                if not alive:
                    break
        finally:
            if loading is not None:
                _without(alive, await loading, result)
            # CUDA buffers are not kept until the next sync, because trainer or engine need the GPU
            # memory meanwhile.
            self._keep_shared()
        return result

    async def close(self) -> None:
        """Release the shared memory, and remove the files that engines left there when they
        died.
        """
        self.spare.clear()
        self._sweep()
        if self.files is not None and not self.leftovers:
            self.files.close()
            self.files = None

    def _sweep(self) -> None:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()  # frees memory whose handles the engines have closed meanwhile
        self.leftovers = [leftover for leftover in self.leftovers if not leftover.remove()]
        sweep_shared_memory()

    async def push_staged(
        self, staged: Staged, engines: Sequence[EngineHandle], update: WeightUpdate
    ) -> Failures:
        loaded_by_all = False
        peers = update.peers
        bucket = staged.bucket
        others = dict[str, list[str]]()
        try:
            if peers is not None:
                others = await asyncio.to_thread(
                    peers.collect, [engine.url for engine in engines], bucket
                )
            _, failed = await on_each(
                engines,
                lambda engine: engine.push(bucket, update.version, others.get(engine.url, ())),
                f"load bucket {bucket.index} of weights {update.version}",
                self.deadline,
            )
            if peers is not None:
                left = [engine.url for engine in engines if engine.url not in failed]
                await asyncio.to_thread(peers.loaded, bucket.index, left, bool(failed))
            loaded_by_all = not failed
        finally:
            # This also runs after an exception and a cancellation, when an engine may still be
            # loading the bucket.
            self._take_back(staged, not loaded_by_all)
        return failed

    def _take_back(self, staged: Staged, failed: bool) -> None:
        """Keep the buffer for later use if all engines have loaded it. After a failure, an engine
        may still have it open, so it cannot be used again."""
        buffer = staged.drop()
        if failed:
            self.leftovers.append(Leftover(buffer))
        else:  # the engines have closed their handles: they release the tensors before they answer
            self.spare.append(buffer)

    def contribute(self, link: PeerLink, buckets: Iterable[Bucket]) -> None:
        """Offer this rank's copy of the buckets to engines of another sender, and wait until they
        are loaded.
        """
        self._prepare()
        files = self.files
        try:
            contribute(
                link,
                buckets,
                lambda bucket: stage(bucket, self.spare, files),
                entry,
                self._take_back,
            )
        finally:
            self._keep_shared()

    def _keep_shared(self) -> None:
        """Free spare CUDA buffers."""
        self.spare = [buffer for buffer in self.spare if not buffer.flat.is_cuda]


def _without(
    alive: Sequence[EngineHandle], failed: Failures, result: SendResult
) -> list[EngineHandle]:
    result.failed.update(failed)
    return [engine for engine in alive if engine.url not in failed]


def stage(bucket: Bucket, spare: list[Buffer], files: FileList | None) -> Staged:
    """Copy a bucket into one buffer that other processes can open. The tensors of the new bucket
    are views into it.

    Args:
        spare: Unused buffers. If one of them is large enough, it is removed from the list and used.
        files: The list to which the file of a new buffer is added; None for buffers without files.
    """
    import torch

    entries, size = layout(bucket.tensors)
    device = bucket.tensors[0][1].device
    buffer = _buffer(max(size, 1), device, spare, files)
    flat = flatten(bucket.tensors, entries, max(size, 1), buffer.flat)
    # the engine reads in another process, which does not wait for this stream
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return Staged(
        Bucket(bucket.index, [(e.name, e.view(flat)) for e in entries], bucket.last, flat), buffer
    )


def _buffer(size: int, device: torch.device, spare: list[Buffer], files: FileList | None) -> Buffer:
    """Return a buffer of at least ``size`` bytes. At most one spare buffer that is too small is
    kept.
    """
    import torch

    large_enough = [i for i, buffer in enumerate(spare) if buffer.flat.numel() >= size]
    if large_enough:
        return spare.pop(min(large_enough, key=lambda i: spare[i].flat.numel()))
    del spare[1:]
    if files is None:
        return Buffer(torch.empty(size, dtype=torch.uint8, device=device))
    if device.type == "cpu":
        return allocate(size, files)
    with _plain_allocator():
        return Buffer(torch.empty(size, dtype=torch.uint8, device=device))


@contextmanager
def _plain_allocator() -> Iterator[None]:
    """Allocate with cudaMalloc, because memory of expandable segments cannot be shared by
    handle.
    """
    import torch

    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get(
        "PYTORCH_ALLOC_CONF", ""
    )
    if "expandable_segments:True" not in settings:
        yield
        return
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
