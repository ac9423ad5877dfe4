"""Files that survive a crash: written under a temporary name, synced to the disk, then renamed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NotRequired, TypedDict

import xxhash

from slime.data.value_files import sync_path

_CHUNK = 8 * 2**20
_THREADS = 4


class FileEntry(TypedDict):
    """The entry of a file in a manifest."""

    path: str
    """Relative to the snapshot. In the entries that a rank returns: relative to the folder that it was told to use."""
    size: int
    digest: str
    """XXH3-128 (hex) of its bytes."""
    rank: NotRequired[int]
    """The training rank that wrote the file. The ranks that read the snapshot compare its digest, not the driver."""


class DigestedFile:
    """A new file that is written sequentially, and whose digest is computed while it is written.

    So the file need not be read again for its digest. It has the methods that torch.save uses. Closing it syncs it to
    the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._digest = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: bytes | memoryview) -> int:
        self._digest.update(data)
        self._size += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def __enter__(self) -> DigestedFile:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def entry(self, root: Path) -> FileEntry:
        """Return the entry of the closed file, with its path relative to ``root``."""
        return {"path": self.path.relative_to(root).as_posix(), "size": self._size, "digest": self._digest.hexdigest()}


def describe_files(paths: list[Path], root: Path) -> list[FileEntry]:
    """Sync files to the disk, and return their entries with paths relative to ``root``."""
    for path in paths:
        sync_path(path)
    return [
        {"path": path.relative_to(root).as_posix(), "size": path.stat().st_size, "digest": digest}
        for path, digest in zip(paths, digest_files(paths), strict=True)
    ]


def file_digest(path: Path) -> str:
    """Return the XXH3-128 (hex) of the bytes of a file."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def digest_files(paths: list[Path]) -> list[str]:
    """Return the :func:`file_digest` of many files, computed by several threads."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(file_digest, paths))
