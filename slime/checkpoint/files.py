"""Files that survive a crash: written under a temporary name, synced to the disk, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, BinaryIO, NotRequired, TypedDict, cast

import xxhash

from slime.data.plain_files import load_plain, plain

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

    So the file need not be read again for its digest. It has the methods that :func:`save_value` uses. Closing it syncs
    it to the disk.
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


def save_value(value: object, file: IO[bytes] | DigestedFile) -> None:
    """Write a value to an open file with ``torch.save``. A full disk raises its :class:`OSError`.

    torch itself raises a RuntimeError that does not name the cause: the error of the file is only its context, and
    there is none if torch has opened the file.
    """
    import torch

    try:
        torch.save(value, cast("IO[bytes]", file))
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def describe_files(paths: list[Path], root: Path) -> list[FileEntry]:
    """Sync files to the disk, and return their entries with paths relative to ``root``."""
    for path in paths:
        sync_path(path)
    return [
        {"path": path.relative_to(root).as_posix(), "size": path.stat().st_size, "digest": digest}
        for path, digest in zip(paths, digest_files(paths), strict=True)
    ]


def sync_path(path: Path) -> None:
    """Make the contents of a file durable, or the renames and new names inside a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a temporary file, then rename it to ``path``. A reader sees either the old or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(aside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_path(path.parent)  # without it, the rename could be lost when the power fails


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


def write_state(path: Path, state: object) -> None:
    """Write ``state`` atomically, in the format that ``torch.load`` reads."""
    write_atomically(path, lambda file: save_value(plain(state), file))


def read_state(path: Path) -> Any:
    """Read a file of :func:`write_state`. No code in the file is executed (:mod:`slime.data.plain_files`).

    Raises:
        FileNotFoundError: The file does not exist.
        UnsafeFileError: The file contains something else than plain values.
    """
    if not path.is_file():
        present = ", ".join(sorted(p.name for p in path.parent.iterdir())) if path.parent.is_dir() else "no such folder"
        raise FileNotFoundError(f"state file {path} is missing (the folder contains: {present or 'nothing'})")
    return load_plain(path)
