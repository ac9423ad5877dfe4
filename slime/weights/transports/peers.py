"""Engines that span the GPUs of several training ranks: each rank offers its own copy of every bucket.

A CUDA IPC handle opens only on the node of its GPU, and reading another GPU's memory costs a copy between GPUs. For a
colocated engine with tensor parallelism, the training rank on the GPU of each tensor-parallel rank therefore stages
the bucket itself. One of these ranks, the sender, collects the serialized handles and talks to the engine.

The ranks exchange short texts through the key-value store of the trainer's process group:

* sender to peer, in order: the settings of the update, one message per bucket that was loaded, and an end;
* peer to sender: for each bucket and engine, the entry for ``serialized_named_tensors``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from slime.engines.flat import Bucket

if TYPE_CHECKING:
    from torch.distributed import Store

    from slime.weights.transports.ipc import Staged

Entry = Callable[[Bucket], str]
"""Makes the entry of one tensor-parallel rank for a staged bucket."""


class PeerError(RuntimeError):
    """Another training rank could not stage a bucket, or its buckets differ from the sender's."""


def connect_store(address: str, port: int, seconds: float) -> Store:
    """A connection of its own to the trainer's key-value store: a wait blocks all users of one connection."""
    from torch.distributed import TCPStore

    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False)


@dataclass
class PeerLink:
    """One rank's part in one weight update. Every rank makes one with the same ``token`` and ``ranks``.

    Args:
        store: shared by all ranks.
        token: differs between updates.
        rank: this training rank.
        ranks: engine URL to the training ranks on the GPUs of its tensor-parallel ranks, in that order.
        seconds: deadline of each wait.
    """

    store: Store
    token: str
    rank: int
    ranks: Mapping[str, Sequence[int]]
    seconds: float
    _posted: dict[str, int] = field(default_factory=dict)

    # --- the sender --------------------------------------------------------------------------

    @property
    def peers(self) -> list[int]:
        """The other ranks of the engines that this rank sends to."""
        mine = [ranks for ranks in self.ranks.values() if ranks[0] == self.rank]
        return sorted({peer for ranks in mine for peer in ranks if peer != self.rank})

    def open(self, settings: Mapping[str, object]) -> None:
        """Tell the peers how to make the buckets."""
        self._tell({"settings": dict(settings)})

    def collect(self, urls: Iterable[str], bucket: Bucket) -> dict[str, list[str]]:
        """The peers' entries of one bucket, by engine, in the order of its tensor-parallel ranks from the second.

        Raises:
            PeerError: a peer failed, or its bucket holds other tensors.
            RuntimeError: a peer did not answer in time (of torch's store).
        """
        return {url: [self._entry(url, bucket, peer) for peer in self.ranks[url][1:]] for url in urls}

    def loaded(self, index: int, engines: Iterable[str], failed: bool) -> None:
        """All engines have answered. ``engines``: those that go on; ``failed``: one may still have the bucket open."""
        self._tell({"loaded": index, "engines": list(engines), "failed": failed})

    def close(self) -> None:
        """The update has ended, in whatever way."""
        self._tell({"end": True})

    def _entry(self, url: str, bucket: Bucket, peer: int) -> str:
        said = self._take(self._place(peer, bucket.index, url))
        if "error" in said:
            raise PeerError(f"training rank {peer} could not stage bucket {bucket.index}: {said['error']}")
        if said["layout"] != _layout(bucket):
            raise PeerError(f"training rank {peer} has other tensors in bucket {bucket.index} than rank {self.rank}")
        return str(said["entry"])

    def _tell(self, message: Mapping[str, object]) -> None:
        for peer in self.peers:
            key = f"{self.token}/orders/{peer}"
            self._put(f"{key}/{self._next(key)}", message)

    # --- a peer ------------------------------------------------------------------------------

    def engines(self) -> list[str]:
        """The engines that read this rank's memory, but that another rank sends to."""
        return [url for url, ranks in self.ranks.items() if self.rank in ranks[1:]]

    def settings(self) -> dict[str, Any] | None:
        """The sender's settings; None when the update ended before it began."""
        settings: dict[str, Any] | None = self.next_order().get("settings")
        return settings

    def next_order(self) -> dict[str, Any]:
        """The sender's next message; waits for it."""
        key = f"{self.token}/orders/{self.rank}"
        return self._take(f"{key}/{self._next(key)}")

    def offer(self, url: str, bucket: Bucket, entry: str) -> None:
        self._put(self._place(self.rank, bucket.index, url), {"entry": entry, "layout": _layout(bucket)})

    def fail(self, url: str, index: int, error: BaseException) -> None:
        """Tell the sender that this rank cannot go on."""
        self._put(self._place(self.rank, index, url), {"error": f"{type(error).__name__}: {error}"})

    # --- the store ---------------------------------------------------------------------------

    def _place(self, rank: int, index: int, url: str) -> str:
        return f"{self.token}/bucket/{rank}/{index}/{url}"

    def _put(self, key: str, value: Mapping[str, object]) -> None:
        self.store.set(key, json.dumps(value))

    def _take(self, key: str) -> dict[str, Any]:
        self.store.wait([key], timedelta(seconds=self.seconds))
        value: dict[str, Any] = json.loads(self.store.get(key))
        self.store.delete_key(key)
        return value

    def _next(self, key: str) -> int:
        self._posted[key] = self._posted.get(key, -1) + 1
        return self._posted[key]


def contribute(
    link: PeerLink,
    buckets: Iterable[Bucket],
    stage: Callable[[Bucket], Staged],
    entry: Entry,
    take_back: Callable[[Staged, bool], None],
) -> None:
    """A peer's side of one update, on the thread that gathers.

    Like the sender's, at most two buckets are staged at a time: the next is gathered while engines load one.

    Args:
        buckets: cut as the sender cuts them.
        stage: copies a bucket into memory that other processes can open.
        entry: serializes a staged bucket's handle; called once per engine, because every process that opens a handle
            also counts it down.
        take_back: gets each staged bucket when its engines have answered, and whether one of them may still have it
            open.
    """
    engines, index = link.engines(), 0
    staged: list[Staged] = []
    try:
        for bucket in buckets:
            index = bucket.index
            staged.append(stage(bucket))
            for url in engines:
                link.offer(url, staged[-1].bucket, entry(staged[-1].bucket))
            if len(staged) == 2:
                order = link.next_order()
                if "end" in order:
                    return
                take_back(staged.pop(0), bool(order["failed"]))
                engines = [url for url in engines if url in order["engines"]]
        while "loaded" in (order := link.next_order()):
            take_back(staged.pop(0), bool(order["failed"]))
    except BaseException as error:
        for url in engines:  # the sender waits for this bucket or the next one
            link.fail(url, index, error)
            link.fail(url, index + 1, error)
        raise
    finally:
        while staged:  # the update ended early
            take_back(staged.pop(0), True)


def _layout(bucket: Bucket) -> str:
    """Equal for buckets of the same names, shapes and dtypes in the same order."""
    described = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in bucket.tensors]
    return hashlib.sha256(repr(described).encode()).hexdigest()
