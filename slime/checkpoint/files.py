"""Files that survive a crash: written aside, synced to disk, then renamed into place."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import xxhash

_CHUNK = 8 * 2**20
_THREADS = 4


def sync_directory(path: Path) -> None:
    """Make renames and new names inside ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a file aside, then put it at ``path``: a reader sees the old or the new one, whole."""
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
    sync_directory(path.parent)


def file_digest(path: Path) -> str:
    """XXH3-128 (hex) of a file's bytes."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def digest_files(paths: list[Path]) -> list[str]:
    """:func:`file_digest` of many files, some at a time."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(file_digest, paths))
