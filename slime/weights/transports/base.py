"""What all transports have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slime.engines.fan_out import Failures
from slime.engines.flat import Bucket
from slime.engines.handle import EngineHandle
from slime.weights.update import WeightUpdate

OpenWindow = Callable[[], Awaitable[Sequence[EngineHandle]]]
"""Pauses the engines and opens the update on them; returns those that are ready."""


@dataclass
class SendResult:
    """What was sent, and which engines it did not reach. Bytes and tensors count once, not per engine."""

    nbytes: int = 0
    density: float = 1.0  # changed bytes over all bytes
    tensors: int = 0
    failed: Failures = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)  # alive, but without the whole update

    def count(self, bucket: Bucket) -> None:
        self.nbytes += bucket.nbytes
        self.tensors += len(bucket.tensors)


class Transport(Protocol):
    """One way to bring a :class:`WeightUpdate` to engines. Used by one sync at a time, on one event loop."""

    name: str
    bracketed: bool  # tensors go between begin_update and end_update
    bucket_bytes: int  # without --update-weight-buffer-size

    async def connect(self, engines: Sequence[EngineHandle]) -> Failures:
        """Get ready to send to exactly these engines; cheap when nothing changed. Engines keep generating.
        Returns those that could not be reached, with the reason."""

    async def send(
        self, update: WeightUpdate, engines: Sequence[EngineHandle], open_window: OpenWindow | None = None
    ) -> SendResult:
        """Bring all buckets to the engines.

        Args:
            update: its buckets are taken one at a time.
            engines: those that :meth:`connect` reached.
            open_window: called once, when everything that can be done beside running engines is done
                and the first bytes are about to go; the update then goes to the engines that it returns.

        Failures of engines are results, not exceptions. An exception means that the update itself could
        not be made or read; then all engines are torn.
        """

    async def close(self) -> None:
        """Give back process groups, shared memory and files. The transport can connect again."""


async def stream(buckets: Iterable[Bucket]) -> AsyncIterator[Bucket]:
    """Iterate in a thread, so that a bucket that is still being gathered does not stop the event loop."""
    iterator = iter(buckets)
    while (bucket := await asyncio.to_thread(next, iterator, None)) is not None:
        yield bucket
