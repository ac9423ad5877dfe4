"""The stream of a trainer's tensors on its way to the transport.

All ranks iterate the stream (:class:`WeightSource`), because gathering is a collective operation. A sender divides it
into buckets (:func:`sent_buckets`) and passes them from the thread that gathers to the event loop that sends
(:class:`Handoff`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from slime.engines.flat import Bucket, NamedTensor
from slime.models.fp8_format import layout_of
from slime.weights.settings import AdapterSource, WeightSyncSettings
from slime.weights.update import (
    FACTORS,
    Transform,
    cast_floating,
    frozen_by_flags,
    iter_buckets,
    leave_out,
    quantize_fp8,
    repeat_embedding,
    transformed,
)

if TYPE_CHECKING:
    import torch


class WeightSource:
    """The stream of tensors of all ranks, each of which starts it once and iterates it to its end."""

    def __init__(self, whole: Iterable[NamedTensor], adapter: AdapterSource | None) -> None:
        self.whole = whole
        self.adapter = adapter
        self._started = False
        self._tensors: Iterator[NamedTensor] = iter(())

    def start(self, base: bool) -> Iterator[NamedTensor]:
        """Return the stream. This is a collective operation if there is an adapter.

        Args:
            base: Whether this rank sends the base. If no rank does, the stream has only the factors of the adapter.
        """
        self._started = True  # before the ranks meet, so that they do not meet twice if that fails
        if self.adapter is None or self.adapter.any_rank(base):
            self._tensors = iter(self.whole)
        else:
            self._tensors = iter(self.adapter.factors)
        return self._tensors

    def finish(self) -> None:
        """Iterate to the end, also after an error, because the other ranks wait in these collective operations."""
        for _ in self._tensors if self._started else self.start(base=False):
            pass


def transforms_of(settings: WeightSyncSettings, dtype: torch.dtype | None, leave_out_frozen: bool) -> list[Transform]:
    """Return the transforms that each tensor goes through. ``dtype`` is that of the engines; None for no cast."""
    transforms: list[Transform] = []
    frozen = frozen_by_flags(settings.only_train, settings.freeze)
    if frozen is not None and leave_out_frozen:
        transforms.append(leave_out(frozen))
    if dtype is not None:
        transforms.append(cast_floating(dtype))
    if settings.untied_engines:
        transforms.append(repeat_embedding)
    if settings.fp8 is not None:
        transforms.append(quantize_fp8(layout_of(settings.model, settings.fp8)))
    return transforms


def sent_buckets(
    settings: WeightSyncSettings, source: Iterable[NamedTensor], size: int, transforms: list[Transform]
) -> Iterator[Bucket]:
    """Divide the stream into buckets. The factors of an adapter that engines load by name are a bucket of their own,
    the last one."""
    if settings.adapter is None or settings.adapter_name is None:
        yield from iter_buckets(source, size, transforms)
        return
    factors: list[NamedTensor] = []
    count = -1

    def base() -> Iterator[NamedTensor]:
        for name, tensor in source:
            if name.endswith(FACTORS):
                factors.extend(transformed([(name, tensor)], transforms))
            else:
                yield name, tensor

    for bucket in iter_buckets(base(), size, transforms):
        count = bucket.index
        yield bucket
    yield Bucket(count + 1, factors, last=True, adapter=True)


def finished(buckets: Iterable[Bucket]) -> Iterator[Bucket]:
    """Wait for the kernels that write each bucket, because other threads will read it on other streams."""
    import torch

    for bucket in buckets:
        tensor = bucket.tensors[0][1]
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        yield bucket


class Handoff:
    """An iterable of buckets that holds one bucket at a time. Both sides wait with a deadline.

    The gathering side calls :meth:`put` for each bucket and then :meth:`close`. The sending side iterates, on any
    thread. :meth:`put` returns after the bucket was taken, so at most one bucket is gathered while one is sent.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._changed = threading.Condition()
        self._item: Bucket | None = None
        self._closed = False
        self._abandoned = False
        self._error: BaseException | None = None

    def put(self, bucket: Bucket) -> bool:
        """Pass one bucket. Return False if the sending side has given up: nothing more will be sent, but gathering must
        still be completed on all ranks."""
        with self._changed:
            if self._abandoned:
                return False
            self._item = bucket
            self._changed.notify_all()
            self._wait(
                lambda: self._item is None or self._abandoned, f"bucket {bucket.index} to be taken by the sender"
            )
            self._item = None
            return not self._abandoned

    def close(self, error: BaseException | None = None) -> None:
        """End the iteration after the last bucket, with ``error`` by raising it in the sending side."""
        with self._changed:
            self._closed = True
            self._error = error
            self._changed.notify_all()

    def abandon(self) -> None:
        """End the waits of both sides, because the sending side has given up or is done."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Bucket]:
        while True:
            with self._changed:
                done = lambda: self._item is not None or self._closed or self._abandoned  # noqa: E731
                self._wait(done, "the trainer to gather the next bucket")
                if self._item is None:
                    if self._error is not None:
                        raise self._error
                    return
                bucket = self._item
                self._item = None
                self._changed.notify_all()
            yield bucket

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(done, self._deadline):
            raise TimeoutError(f"gave up after waiting {self._deadline:.0f} s for {what}")
