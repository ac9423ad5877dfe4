"""Send weights to engines that span the GPUs of several training ranks, each of which offers its
copy of every bucket.

A CUDA IPC handle can only be opened on the node of its GPU, and reading the memory of another GPU
needs a copy between GPUs. So for a colocated engine with tensor parallelism, the training rank on
the GPU of each tensor-parallel rank stages the bucket itself. One of these ranks, the sender,
collects the serialized handles and sends them to the engine.

The ranks exchange short messages through the key-value store of the trainer's process group:

* The sender sends to each peer, in order, the settings of the update, one message per loaded
  bucket, and an end.
* A peer sends to the sender, for each bucket and engine, the entry for
  ``serialized_named_tensors``.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from slime.engines.payload import Bucket

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

    from slime.weights.transports.ipc import Staged

Entry = Callable[[Bucket], str]
"""Returns the entry of one tensor-parallel rank for a staged bucket."""


class PeerError(RuntimeError):
    """Another training rank could not stage a bucket, or its bucket differs from the sender's."""


def serve_store(address: str, port: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Start a key-value store, which has no authentication and so listens on ``address`` only.

    Args:
        port: 0 for any free one.
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    return TCPStore(
        address,
        listener.getsockname()[1],
        world_size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(address: str, port: int, seconds: float) -> Store:
    """Open a new connection to the trainer's key-value store, because a wait blocks all users of a
    connection.
    """
    from torch.distributed import TCPStore

    return TCPStore(
        address, port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False
    )


@dataclass
class PeerLink:
    """The link of one rank to the others in one weight update. All ranks must use the same
    ``token`` and ``ranks``.

    Args:
        store: The key-value store that all ranks share.
        token: A prefix of all keys, which must be different for each update.
        rank: This training rank.
        ranks: For each engine URL, the training ranks on the GPUs of its tensor-parallel ranks, in
            their order.
        seconds: The time limit of each wait.
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
        """Send the settings of the update to the peers, which then make the same buckets."""
        self._tell({"settings": dict(settings)})

    def collect(self, urls: Iterable[str], bucket: Bucket) -> dict[str, list[str]]:
        """Return the peers' entries of one bucket for each engine, in the order of its second and
        later ranks.

        Raises:
            PeerError: A peer failed, or its bucket has other tensors.
            RuntimeError: A peer did not answer in time (raised by torch's store).
        """
        return {
            url: [self._entry(url, bucket, peer) for peer in self.ranks[url][1:]] for url in urls
        }

    def loaded(self, index: int, engines: Iterable[str], failed: bool) -> None:
        """Tell the peers that all engines have answered.

        Args:
            engines: The engines that get the next bucket.
            failed: Whether an engine failed and may still have the bucket open.
        """
        self._tell({"loaded": index, "engines": list(engines), "failed": failed})

    def close(self) -> None:
        """Tell the peers that the update has ended, successfully or not."""
        self._tell({"end": True})

    def _entry(self, url: str, bucket: Bucket, peer: int) -> str:
        said = self._take(self._place(peer, bucket.index, url))
        if "error" in said:
            raise PeerError(
                f"training rank {peer} could not stage bucket {bucket.index}: {said['error']}"
            )
        if said["layout"] != _layout(bucket):
            raise PeerError(
                f"bucket {bucket.index} has other tensors on training rank {peer} than on rank "
                f"{self.rank}"
            )
        return str(said["entry"])

    def _tell(self, message: Mapping[str, object]) -> None:
        for peer in self.peers:
            key = f"{self.token}/orders/{peer}"
            self._put(f"{key}/{self._next(key)}", message)

    # --- a peer ------------------------------------------------------------------------------

    def engines(self) -> list[str]:
        """Return the engines that read this rank's memory but have another rank as their sender."""
        return [url for url, ranks in self.ranks.items() if self.rank in ranks[1:]]

    def settings(self) -> dict[str, Any] | None:
        """Wait for the sender's settings and return them; None if the update ended before they were
        sent.
        """
        settings: dict[str, Any] | None = self.next_order().get("settings")
        return settings

    def next_order(self) -> dict[str, Any]:
        """Wait for the next message of the sender and return it."""
        key = f"{self.token}/orders/{self.rank}"
        return self._take(f"{key}/{self._next(key)}")

    def offer(self, url: str, bucket: Bucket, entry: str) -> None:
        self._put(
            self._place(self.rank, bucket.index, url), {"entry": entry, "layout": _layout(bucket)}
        )

    def fail(self, url: str, index: int, error: BaseException) -> None:
        """Tell the sender that this rank has failed."""
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
    """Run the peer's side of one update, on the thread that gathers.

    As on the sender, at most two buckets are staged at a time: the next is gathered while engines
    load one.

    Args:
        buckets: The same buckets as those of the sender.
        stage: Copies a bucket into memory that other processes can open.
        entry: Serializes the handle of a staged bucket. It is called once per engine, because each
            process that opens a handle also decreases its reference count.
        take_back: Called with each staged bucket after its engines have answered, and with whether
            one of them may still have it open.
    """
    engines = link.engines()
    index = 0
    staged: list[Staged] = []
    try:
        for bucket in buckets:
            index = bucket.index
            staged.append(stage(bucket))
            for url in engines:
                link.offer(url, staged[-1].bucket, entry(staged[-1].bucket))
            # The sender tells when its engines have loaded the older of the two buckets.
            if len(staged) == 2:
                order = link.next_order()
                if "end" in order:
                    return
                take_back(staged.pop(0), bool(order["failed"]))
                engines = [url for url in engines if url in order["engines"]]
        while "loaded" in (order := link.next_order()):
            take_back(staged.pop(0), bool(order["failed"]))
    except BaseException as error:
        for url in engines:  # the sender may be waiting for this bucket or for the next one
            link.fail(url, index, error)
            link.fail(url, index + 1, error)
        raise
    finally:
        while staged:  # the update ended early
            take_back(staged.pop(0), True)


def _layout(bucket: Bucket) -> str:
    """Return a hash of the names, shapes and dtypes of the tensors, in order."""
    described = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in bucket.tensors]
    return hashlib.sha256(repr(described).encode()).hexdigest()
