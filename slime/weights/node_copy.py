"""One host copy of the weights for all tensor-parallel ranks of an engine on a node.

The ranks of an engine get every request at the same time. The first one to come takes the version in for all of them:
it reads and verifies the files and brings the shared copy up to date. The others wait for what it announces, open the
same shared memory, and all ranks then load the tensors that changed.
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

from slime.weights.delta import HostBucket
from slime.weights.published import PublishedBucket
from slime.weights.transports.shared_memory import SHARED_MEMORY, FileList, allocate, is_buffer_of_ours

POLL_SECONDS = 0.005
_files: list[FileList] = []


class Handle(NamedTuple):
    """By which a process opens shared memory that another one allocated: torch's service, the file and its bytes."""

    manager: str
    name: str
    size: int


@dataclass
class Announcement:
    """The outcome of a version on the first rank of a node.

    Attributes:
        outcome: ``ready`` or ``failed``; ``alone`` where shared memory is too small for a copy, so that
            each rank keeps its own.
        touched: index of a bucket to the names of its tensors that changed.
        buffers: handles of the buckets' shared memory, where it is new.
    """

    outcome: str
    message: str = ""
    touched: dict[int, list[str]] = field(default_factory=dict)
    buffers: list[Handle] | None = None


class Node:
    """The ranks of one engine on this node, in one request.

    Args:
        prefix: of the request's reports, the same for all ranks.
        seconds: deadline for the first rank to announce.
    """

    def __init__(self, prefix: str, seconds: float) -> None:
        place = f"{prefix}.{socket.gethostname()}-{_boot()}"
        self.file, self.seconds = Path(f"{place}.node"), seconds
        self.turn = Path(f"{place}.first")

    def is_first(self) -> bool:
        """True for exactly one rank of the node."""
        try:
            fd = os.open(self.turn, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return False
        with open(fd, "w") as file:
            file.write(str(os.getpid()))
        return True

    def announce(self, announcement: Announcement) -> None:
        # Renamed into place, so that no rank reads half of it.
        aside = self.file.with_suffix(".tmp")
        aside.write_text(json.dumps(asdict(announcement)))
        os.replace(aside, self.file)

    def wait(self) -> Announcement:
        """Wait for the announcement of the first rank and return it.

        Raises:
            RuntimeError: it died before it announced anything, or the deadline has passed.
        """
        until = time.monotonic() + self.seconds
        while not self.file.exists():
            if self._first_is_gone() and not self.file.exists():
                raise RuntimeError("the rank that took the version in for this node died")
            if time.monotonic() > until:
                raise RuntimeError(f"no rank of this node took the version in within {self.seconds:.0f} s")
            time.sleep(POLL_SECONDS)
        said = json.loads(self.file.read_text())
        said["touched"] = {int(index): names for index, names in said["touched"].items()}
        if said["buffers"] is not None:
            said["buffers"] = [Handle(*handle) for handle in said["buffers"]]
        return Announcement(**said)

    def _first_is_gone(self) -> bool:
        pid = self.turn.read_text()
        if not pid:
            return False  # it is writing it
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        return False


def shared_buckets(buckets: Sequence[PublishedBucket]) -> tuple[list[HostBucket], list[Handle]]:
    """New buckets in shared memory, and the handles by which the other ranks open them.

    Raises:
        MemoryError: there is not enough shared memory.
    """
    if not _files:
        _files.append(FileList())
    made, handles = [], []
    for bucket in buckets:
        flat = allocate(max(bucket.size, 1), _files[0]).flat
        manager, name, size = flat.untyped_storage()._share_filename_cpu_()
        made.append(HostBucket(list(bucket.entries), flat[: bucket.size]))
        handles.append(Handle(manager.decode(), name.decode(), size))
    return made, handles


def open_buckets(buckets: Sequence[PublishedBucket], handles: Sequence[Handle]) -> list[HostBucket]:
    """The buckets that another rank of this node made.

    Raises:
        ValueError: a handle is none of a buffer of this user with room for its bucket.
    """
    import torch

    opened = []
    for bucket, (manager, name, size) in zip(buckets, handles, strict=True):
        service = os.lstat(manager)
        ours = stat.S_ISSOCK(service.st_mode) and service.st_uid == os.geteuid()
        if not ours or not is_buffer_of_ours(str(name).removeprefix("/")) or size < bucket.size:
            raise ValueError(f"{SHARED_MEMORY}{name} is no buffer of this user with {bucket.size} bytes")
        storage = torch.UntypedStorage._new_shared_filename_cpu(manager.encode(), name.encode(), size)
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)[: bucket.size]
        opened.append(HostBucket(list(bucket.entries), flat, dict(bucket.digests)))
    return opened


def take_turns(node: Node, take_in: Callable[[], Announcement]) -> tuple[Announcement, bool]:
    """The first rank runs ``take_in`` and announces the result; the others wait for it. Returns whether this is the
    first. An error of the first is announced to the others and raised here."""
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
    """Tells machines with the same name apart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return "unknown"
