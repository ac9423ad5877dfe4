"""The interface of transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slime.config.weight_sync import TransportKind as TransportKind
from slime.engines.handle import EngineHandle, Failures
from slime.engines.payload import Bucket
from slime.weights.update import WeightUpdate


class OpenWindow(Protocol):
    """Pauses the engines and opens the update on them, and returns the engines that are ready."""

    def __call__(self, adapter_only: bool = False) -> Awaitable[Sequence[EngineHandle]]:
        """Open the window.

        Args:
            adapter_only: Whether nothing but an adapter changes that engines load by name.
        """


@dataclass
class SendResult:
    """What was sent, and the engines that it did not reach. Bytes and tensors are counted once, not
    per engine.
    """

    nbytes: int = 0
    density: float = 1.0  # changed bytes divided by all bytes
    tensors: int = 0
    failed: Failures = field(default_factory=dict)
    # engines that are alive but have only a part of the update
    torn: list[str] = field(default_factory=list)

    def count(self, bucket: Bucket) -> None:
        self.nbytes += bucket.nbytes
        self.tensors += len(bucket.tensors)


class Transport(Protocol):
    """A way to send a :class:`WeightUpdate` to engines. It is used by one sync at a time, on one
    event loop.
    """

    name: str
    # whether engines need begin_update before the tensors and end_update after them
    bracketed: bool
    bucket_bytes: int  # the default of --update-weight-buffer-size

    async def connect(self, engines: Sequence[EngineHandle]) -> Failures:
        """Prepare to send to exactly these engines, while they generate. This is cheap if the
        engines are the same.

        Returns:
            The engines that could not be reached, with the reasons.
        """

    async def send(
        self,
        update: WeightUpdate,
        engines: Sequence[EngineHandle],
        open_window: OpenWindow | None = None,
    ) -> SendResult:
        """Send all buckets to the engines.

        Failures of engines are part of the result. An exception means that the update itself could
        not be made or read; then all engines are torn.

        Args:
            update: The update. Its buckets are taken one at a time.
            engines: The engines that :meth:`connect` reached.
            open_window: Called once, when everything is done that can be done while the engines
                generate, and before the first bytes are sent. The update is sent to the engines
                that it returns.
        """

    async def close(self) -> None:
        """Release process groups, shared memory and files. The transport can connect again
        afterwards.
        """


async def stream(buckets: Iterable[Bucket]) -> AsyncIterator[Bucket]:
    """Iterate in a thread, so that waiting for a bucket does not block the event loop."""
    iterator = iter(buckets)
    while (bucket := await asyncio.to_thread(next, iterator, None)) is not None:
        yield bucket
