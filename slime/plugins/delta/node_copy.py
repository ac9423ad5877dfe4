"""Share one host copy of the weights among all tensor-parallel ranks of an engine on a node.

The ranks of an engine get every request at the same time. The first rank that arrives does the work
for all: it reads and verifies the files and updates the shared copy. The other ranks wait for its
announcement and open the same shared memory. Then every rank loads the changed tensors.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from slime.plugins.delta.delta import HostBucket
from slime.plugins.delta.published import PublishedBucket
from slime.weights.transports.shared_memory import (
    SHARED_MEMORY,
    FileList,
    allocate,
    is_buffer_of_ours,
)

POLL_SECONDS = 0.005
_files: list[FileList] = []


class Handle(NamedTuple):
    """A handle to shared memory of another process: the socket of torch's manager, the file, and
    its size in bytes.
    """

    manager: str
    name: str
    size: int


@dataclass
class Announcement:
    """The result of the first rank of a node, for the other ranks.

    Attributes:
        outcome: ``ready`` or ``failed``. Or ``alone``, if shared memory is too small for a copy, so
            that each rank must keep its own copy.
        touched: The names of the changed tensors, by index of the bucket.
        buffers: The handles of the shared memory of the buckets, if it is new.
    """

    outcome: str
    message: str = ""
    touched: dict[int, list[str]] = field(default_factory=dict)
    buffers: list[Handle] | None = None


class Node:
    """The ranks of one engine on this node, for one request.

    Args:
        prefix: The prefix of the report files of the request, which is the same for all ranks.
        seconds: The time limit for the announcement of the first rank.
    """

    def __init__(self, prefix: str, seconds: float) -> None:
        place = f"{prefix}.{socket.gethostname()}-{_boot()}"
        self.file = Path(f"{place}.node")
        self.seconds = seconds
        self.turn = Path(f"{place}.first")

    def is_first(self) -> bool:
        """Return True for exactly one rank of the node: the one that creates the file."""
        try:
            fd = os.open(self.turn, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return False
        with open(fd, "w") as file:
            file.write(str(os.getpid()))
        return True

    def announce(self, announcement: Announcement) -> None:
        # The file is renamed after it is written, so that no rank reads an incomplete file.
        aside = self.file.with_suffix(".tmp")
        aside.write_text(json.dumps(asdict(announcement)))
        os.replace(aside, self.file)

    def wait(self) -> Announcement:
        """Wait for the announcement of the first rank and return it.

        Raises:
            RuntimeError: The first rank died before its announcement, or the deadline has passed.
        """
        until = time.monotonic() + self.seconds
        while not self.file.exists():
            # it may have announced just before it ended
            if self._first_is_gone() and not self.file.exists():
                raise RuntimeError("the rank that reads the weights for this node died")
            if time.monotonic() > until:
                raise RuntimeError(
                    f"no rank of this node finished reading the weights within {self.seconds:.0f} s"
                )
            time.sleep(POLL_SECONDS)
        said = json.loads(self.file.read_text())
        said["touched"] = {int(index): names for index, names in said["touched"].items()}
        if said["buffers"] is not None:
            said["buffers"] = [Handle(*handle) for handle in said["buffers"]]
        return Announcement(**said)

    def _first_is_gone(self) -> bool:
        pid = self.turn.read_text()
        if not pid:
            return False  # the first rank has created the file and not yet written it
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        return False


def shared_buckets(buckets: Sequence[PublishedBucket]) -> tuple[list[HostBucket], list[Handle]]:
    """Allocate buckets in shared memory, and return them with the handles for the other ranks.

    Raises:
        MemoryError: There is not enough shared memory.
    """
    if not _files:
        _files.append(FileList())
    made = []
    handles = []
    for bucket in buckets:
        flat = allocate(max(bucket.size, 1), _files[0]).flat
        manager, name, size = flat.untyped_storage()._share_filename_cpu_()
        made.append(HostBucket(list(bucket.entries), flat[: bucket.size]))
        handles.append(Handle(manager.decode(), name.decode(), size))
    return made, handles


def open_buckets(buckets: Sequence[PublishedBucket], handles: Sequence[Handle]) -> list[HostBucket]:
    """Open the buckets that another rank of this node allocated.

    Raises:
        ValueError: A handle does not belong to shared memory of this user that is large enough for
            its bucket.
    """
    import torch

    opened = []
    for bucket, (manager, name, size) in zip(buckets, handles, strict=True):
        service = os.lstat(manager)
        ours = stat.S_ISSOCK(service.st_mode) and service.st_uid == os.geteuid()
        if not ours or not is_buffer_of_ours(str(name).removeprefix("/")) or size < bucket.size:
            raise ValueError(
                f"{SHARED_MEMORY}{name} is not a buffer of this user with {bucket.size} bytes"
            )
        storage = torch.UntypedStorage._new_shared_filename_cpu(
            manager.encode(), name.encode(), size
        )
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)[: bucket.size]
        opened.append(HostBucket(list(bucket.entries), flat, dict(bucket.digests)))
    return opened


def take_turns(node: Node, take_in: Callable[[], Announcement]) -> tuple[Announcement, bool]:
    """Run ``take_in`` on the first rank and announce its result; the other ranks wait for it.

    An error on the first rank is announced to the others and raised here.

    Returns:
        The announcement, and whether this is the first rank.
    """
    if not node.is_first():
        return node.wait(), False
    try:
        announcement = take_in()
    except BaseException as error:
        node.announce(Announcement("failed", f"{type(error).__name__}: {error}"))
        raise
    node.announce(announcement)
    return announcement, True


def touched_names(touched: Mapping[int, set[str]]) -> dict[int, list[str]]:
    return {index: sorted(names) for index, names in touched.items()}


def _boot() -> str:
    """Return an id that distinguishes machines with the same name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return "unknown"
