"""Files of values that survive a crash: written under a temporary name, synced to the disk, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol, cast

from slime.data.plain_files import load_plain, plain


class Output(Protocol):
    """The methods of a file that ``torch.save`` uses."""

    def write(self, data: bytes | memoryview, /) -> int: ...

    def tell(self) -> int: ...

    def flush(self) -> None: ...


def save_value(value: object, file: IO[bytes] | Output) -> None:
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
