"""Send the factors of an adapter (LoRA) to engines that load adapters by name, and the base by
another transport.

The last bucket of an update has all factors (:attr:`slime.engines.payload.Bucket.adapter`). The
buckets before it, if there are any, are weights of the base. In most updates there are none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slime.engines.handle import EngineHandle, Failures, on_each
from slime.engines.payload import (
    AdapterPayload,
    AdapterRequest,
    Bucket,
    adapter_payload,
    shared_memory,
)
from slime.weights.settings import Written
from slime.weights.transports.base import OpenWindow, SendResult, Transport
from slime.weights.transports.disk import NewestVersion, publishing
from slime.weights.transports.shared_memory import pin
from slime.weights.update import WeightUpdate

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class _Buffer:
    flat: torch.Tensor  # uint8, on the host
    readers: set[str] = field(default_factory=set)  # the URLs of engines that may read it


class AdapterMemory:
    """Two buffers, in which the versions of an adapter alternate.

    SGLang reads a version in the memory of the trainer until it has loaded the next one. New memory
    for each version would be simpler, but its pages take longer to allocate than the factors take
    to copy, and CUDA copies faster to page-locked memory, which takes even longer to allocate.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []
        self._current: _Buffer | None = None

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """Return ``size`` bytes of shared memory that no engine reads.

        Args:
            device: The device from which the factors are copied. The memory is page-locked for a
                CUDA device.
        """
        free = [
            buffer for buffer in self._buffers if not buffer.readers and buffer.flat.numel() == size
        ]
        if not free:  # a buffer that engines read is left to them, and is freed when they close it
            free = [_Buffer(shared_memory(size)) for _ in range(1 if self._buffers else 2)]
            for buffer in free:
                pin(buffer, device)
            newest = [] if self._current is None else [self._current]
            self._buffers = [*newest, *free]
        self._current = free[0]
        return self._current.flat

    def sent(self, engines: Iterable[str]) -> None:
        """Record which engines get the memory that was taken last. They may read it from now on."""
        assert self._current is not None, "take the memory first"
        self._current.readers |= set(engines)

    def loaded(self, engines: Iterable[str]) -> None:
        """Record which engines have loaded the version in the memory that was taken last, and read
        no other one.
        """
        for buffer in self._buffers:
            if buffer is not self._current:
                buffer.readers -= set(engines)


class AdapterTransport:
    """Loads each version of the factors under one name.

    Args:
        base: The transport for the weights of the base.
        name: The name of the adapter.
        config: The content of PEFT's ``adapter_config.json``.
        folder: A folder with the same path on trainer and engines, to load PEFT's files from it;
            None to send the factors in the request.
        keep_files, written: As for :class:`~slime.weights.transports.disk.DiskTransport`, for
            PEFT's files.
        shared: Whether all engines are on this host and can open shared memory.
        digests: Whether engines compare digests of the factors before they load them, if they can.
        deadline: The time limit in seconds for an engine to load the factors.
    """

    def __init__(
        self,
        base: Transport,
        name: str,
        config: Mapping[str, object],
        *,
        folder: Path | None,
        shared: bool,
        digests: bool,
        deadline: float,
        keep_files: bool = False,
        written: Written | None = None,
    ) -> None:
        self.written = written
        self.base = base
        self.adapter = name
        self.config = config
        self.folder = folder
        self.shared = shared
        self.digests = digests
        self.deadline = deadline
        self.name = base.name
        self.bracketed = base.bracketed
        self.bucket_bytes = base.bucket_bytes
        self._memory = AdapterMemory()
        self._newest = NewestVersion(keep_files)

    async def connect(self, engines: Sequence[EngineHandle]) -> Failures:
        return await self.base.connect(engines)

    async def send(
        self,
        update: WeightUpdate,
        engines: Sequence[EngineHandle],
        open_window: OpenWindow | None = None,
    ) -> SendResult:
        buckets = _Split(iter(update.buckets))
        result = SendResult()
        ready = list(engines)
        opened = open_window is None

        async def open_once(adapter_only: bool = False) -> Sequence[EngineHandle]:
            nonlocal ready, opened
            if not opened and open_window is not None:
                ready = list(await open_window(adapter_only))
                opened = True
            return ready

        # The base goes first, by its own transport: after a start or a lost engine, not in most
        # updates.
        if await asyncio.to_thread(buckets.has_base):
            result = await self.base.send(replace(update, buckets=buckets), engines, open_once)
        if buckets.factors is None:
            return result
        # All of this happens while the engines generate: the copy to the host, the digests and the
        # requests. What remains for the pause is that each engine reads its request.
        place = await self._host_copy(buckets.factors, update.version, engines)

        async def prepare(engine: EngineHandle) -> AdapterRequest:
            return await engine.adapter_request(self.adapter, self.config, place)

        requests, failed = await on_each(
            engines, prepare, "prepare the request with the adapter", self.deadline
        )
        result.failed.update(failed)
        lost = {*result.failed, *result.torn}
        alive = [engine for engine in await open_once(adapter_only=True) if engine.url not in lost]

        async def load(engine: EngineHandle) -> None:
            await engine.load_adapter(requests[engine.url])
            if not self.bracketed:  # otherwise the version is set when the update ends
                await engine.name_version(update.version)

        # From here on an engine may read the shared memory, also one that fails: it must not be
        # written again before that engine has loaded another version.
        if isinstance(place, AdapterPayload) and place.shared:
            self._memory.sent(engine.url for engine in alive)
        loaded, failed = await on_each(
            alive, load, f"load the adapter of weights {update.version}", self.deadline
        )
        self._memory.loaded(loaded)
        result.failed.update(failed)
        result.count(buckets.factors)
        return result

    async def _host_copy(
        self, factors: Bucket, version: str, engines: Sequence[EngineHandle]
    ) -> AdapterPayload | Path:
        """Copy the factors to host memory, or to files if there is a folder for them."""
        digests = self.digests and any(engine.capabilities.adapter_digests for engine in engines)
        device = factors.tensors[0][1].device
        memory = partial(self._memory.take, device=device) if self.shared else None
        payload = await asyncio.to_thread(adapter_payload, factors, digests, memory)
        if self.folder is None:
            return payload
        path = await self._publish(self.folder, version, payload.bucket)
        if self.written is not None:
            await asyncio.to_thread(self.written, path, engines)
        return path

    async def _publish(self, folder: Path, version: str, bucket: Bucket) -> Path:
        """Write PEFT's files of a version, and remove those of the version before unless files are
        kept.
        """
        from slime.models.peft_files import write_factors

        async with publishing(folder, f"adapter_v{version}") as aside:
            await asyncio.to_thread(write_factors, aside, dict(self.config), dict(bucket.tensors))
        path = folder / f"adapter_v{version}"
        await self._newest.becomes(path)
        return path

    async def close(self) -> None:
        """Close the transport of the base, release shared memory, and remove the files of the last
        version, unless files are kept."""
        await self._newest.becomes(None)
        self._memory = AdapterMemory()
        await self.base.close()


class _Split(Iterator[Bucket]):
    """Iterates over the buckets of the base, and keeps the bucket of the factors."""

    def __init__(self, buckets: Iterator[Bucket]) -> None:
        self.buckets = buckets
        self.factors: Bucket | None = None
        self._first: Bucket | None = None

    def has_base(self) -> bool:
        """Return whether there is a bucket of the base. This takes the first bucket."""
        self._first = next(self, None)
        return self._first is not None

    def __next__(self) -> Bucket:
        if self._first is not None:
            bucket = self._first
            self._first = None
            return bucket
        bucket = next(self.buckets)
        if bucket.adapter:
            self.factors = bucket
            raise StopIteration
        return bucket
