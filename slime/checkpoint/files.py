"""Files of a snapshot: their digests, a disk that is full, whether all processes write to one folder,
and which classes and functions the pickles name.

Many processes, possibly on several machines, write a snapshot into one folder. Without a check, a
folder that is not shared would be noticed only when the first snapshot is committed, hours later.
So it is checked at the start: the driver writes a file, every process reads it and writes a file of
its own next to it, and the driver looks for all of these files.

The ranks refuse pickles that name other classes as well, but only after the start, and each with
its own words. :func:`hostile_file` executes nothing and does not import torch: every class is
replaced by a plain one.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import secrets
import shutil
import socket
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NotRequired, TypedDict

import xxhash

from slime.data.plain_values import ALLOWED, sync_path

_CHUNK = 8 * 2**20
_THREADS = 4


class FileEntry(TypedDict):
    """The entry of a file in a manifest."""

    path: str
    """Relative to the snapshot. In the entries that a rank returns: relative to the folder that it
    was told to use.
    """
    size: int
    digest: str
    """XXH3-128 (hex) of its bytes."""
    rank: NotRequired[int]
    """The training rank that wrote the file. The ranks that read the snapshot compare its digest,
    not the driver.
    """


class DigestedFile:
    """A new file that is written sequentially, and whose digest is computed while it is written.

    So the file need not be read again for its digest. It has the methods that torch.save uses.
    Closing it syncs it to the disk.
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
        return {
            "path": self.path.relative_to(root).as_posix(),
            "size": self._size,
            "digest": self._digest.hexdigest(),
        }


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


# --- a full disk ---------------------------------------------------------------------------

MIB = 2**20
LEAST_SECONDS = 1.0
MOST_SECONDS = 60.0
POLL_SECONDS = 0.5
_TEXTS = ("No space left on device", "Disk quota exceeded")


def is_full(error: BaseException) -> bool:
    """Whether a write failed because the disk or a quota is full.

    Errors of other processes, of torch and of safetensors arrive as text, so the text decides.
    """
    return any(text in str(error) for text in _TEXTS)


def wait_for_room(
    folder: Path,
    check: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when ``folder`` has more free space than now, or after a minute: free space does not
    show a quota.

    Args:
        check: Called about twice a second. An exception that it raises ends the wait.
    """
    # Free space is compared with that at the start: on a shared disk others write as well.
    start = clock()
    before = shutil.disk_usage(folder).free
    while (waited := clock() - start) < MOST_SECONDS:
        if waited >= LEAST_SECONDS and shutil.disk_usage(folder).free > before + MIB:
            return
        check()
        sleep(POLL_SECONDS)


# --- one folder for all processes ----------------------------------------------------------

_GIB = 2**30


class FolderError(RuntimeError):
    """A folder cannot be used for snapshots. The message says for which process, why, and what to
    do.
    """


class Answer(NamedTuple):
    """The result of the check in one process."""

    host: str
    error: str | None


def try_to_write(folder: Path, needed: int = 0) -> str | None:
    """Check that this machine can write to a folder. Everything that is created for the check is
    removed again.

    Args:
        needed: Number of bytes that must be free.

    Returns:
        What is wrong, or None.
    """
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    trial = folder / f".trial-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(trial, "wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        # A write that succeeds does not tell how much more there is room for.
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"cannot be written on {socket.gethostname()} ({error})"
    finally:
        with contextlib.suppress(OSError):
            trial.unlink()
        for path in absent:
            with contextlib.suppress(OSError):  # it was not created, or another process uses it now
                path.rmdir()
    if free < needed:
        return (
            f"has {free / _GIB:.1f} GiB free, but one snapshot takes about {needed / _GIB:.1f} GiB"
        )
    return None


class FolderTrial:
    """The driver's part of the check. It is a context manager, which removes the files at its
    end.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(8)
        self.place = folder / f".trial-{self.token}"

    def __enter__(self) -> FolderTrial:
        try:
            self.place.mkdir(parents=True)
            (self.place / "driver").write_text(self.token)
        except OSError as error:
            shutil.rmtree(self.place, ignore_errors=True)
            raise FolderError(
                f"--save {self.folder} cannot be written on {socket.gethostname()} ({error})"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.place, ignore_errors=True)

    def check(self, answers: Mapping[str, Answer]) -> None:
        """Check the results of all processes.

        Args:
            answers: The results of :func:`answer` by the name of the process.

        Raises:
            FolderError: A process could not read or write in the folder, or wrote to another
                folder.
        """
        # Two ways to fail: a process says so itself, or the driver does not see what it wrote.
        refused = {
            f"{who} on {a.host}": a.error for who, a in answers.items() if a.error is not None
        }
        os.listdir(self.place)  # lets a network file system refresh its cache of names
        written = {who: a for who, a in answers.items() if a.error is None}
        unseen = [
            f"{who} on {a.host}"
            for who, a in written.items()
            if not (self.place / _file_name(who)).is_file()
        ]
        if not refused and not unseen:
            return
        problems = [f"{who}: {error}" for who, error in refused.items()]
        problems += [
            f"the file of {who} is not on {socket.gethostname()}, the driver's host"
            for who in unseen
        ]
        shown = "; ".join(problems[:4]) + (
            f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        )
        raise FolderError(
            f"--save {self.folder} is not one folder for all processes of the run: {shown}. All "
            "ranks write one snapshot together: name a folder on a file system that every node "
            "mounts at the same path"
        )


def answer(folder: str, token: str, who: str) -> Answer:
    """The part of every other process: read the driver's file, and write a file next to it."""
    place = Path(folder) / f".trial-{token}"
    host = socket.gethostname()
    try:
        os.listdir(place.parent)
        if (place / "driver").read_text() != token:
            return Answer(host, "the driver's file has other contents there")
        (place / _file_name(who)).write_text(token)
    except FileNotFoundError:
        return Answer(host, "the driver's file is not there")
    except OSError as error:
        return Answer(host, str(error))
    return Answer(host, None)


def _file_name(who: str) -> str:
    return who.replace(" ", "-").replace("/", "-")


_KNOWN = re.compile(
    r"torch\.(_utils\._rebuild_\w+|\w+Storage|storage\.\w+Storage|Size|device|dtype|serialization\._get_layout|bfloat16"
    r"|u?int\d+|float\d\w*|bool|complex\d+|distributed\.checkpoint\.(metadata|filesystem|planner|_fsspec_filesystem)\.\w+)"
    r"|collections\.(OrderedDict|defaultdict|Counter)|builtins\.(getattr|set|dict|list|tuple|complex|bytearray|int|float)"
    r"|copyreg\._reconstructor|builtins\.object|numpy\.dtypes?\.?\w*|pathlib\._local\.\w+"
)
_HEAD = 2**16
_FSDP = "dcp"
"""The folder of the tensors of the FSDP backend."""


class _Named(ValueError):
    """A pickle names a class or a function that no snapshot of slime has."""


class _Value:
    """Stands for an object of any class."""

    def __init__(self, *_: object) -> None:
        pass

    def __setitem__(self, name: object, value: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def append(self, value: object) -> None:
        pass

    extend = add = append


def _member(_: object, name: str) -> _Value:
    """Stands for ``getattr``, with which some releases of Python pickle members of enumerations."""
    if not name.isupper():
        raise _Named(f"it takes the attribute {name}")
    return _Value()


class _Reader(pickle.Unpickler):
    def __init__(self, packed: BinaryIO, only_tensors: bool) -> None:
        super().__init__(packed)
        self.only_tensors = only_tensors

    def find_class(self, module: str, name: str) -> Any:
        # The entry of an index that stands for a pickle in another file; slime writes none.
        unknown = f"{module}.{name}" not in ALLOWED and not _KNOWN.fullmatch(f"{module}.{name}")
        if unknown or (self.only_tensors and name == "BytesStorageMetadata"):
            raise _Named(f"it names {module}.{name}")
        return _member if name == "getattr" else _Value

    def persistent_load(self, pid: object) -> Any:
        return _Value()


def hostile_file(snapshot: Path, own_classes: bool = False) -> str | None:
    """Return a line about the first file of a snapshot whose pickle names anything but values; None
    if there is none.

    Args:
        own_classes: Whether the user's functions may have allowed classes for the state of the
            rollouts, so that only the files of the training ranks are read.
    """
    # Sorted, so that the same file is named each time.
    for file in sorted(snapshot.rglob("*")):
        if not file.is_file() or (
            own_classes and file.relative_to(snapshot).parts[0] not in ("actor", "critic")
        ):
            continue
        try:
            for packed in _pickles(file):
                _Reader(packed, file.parent.name == _FSDP).load()
        except _Named as error:
            return (
                f"{file} could execute code ({error}), so it is not loaded: use the original "
                "snapshot"
            )
        except Exception as error:  # a damaged pickle may raise any exception
            why = " ".join(f"{type(error).__name__}: {error}".split())
            return f"{file} cannot be read ({why}): use the original snapshot"
    return None


def _pickles(file: Path) -> Iterator[BinaryIO]:
    # Three formats of torch: the index of a distributed checkpoint, a zip archive, and tensors one
    # after the other.
    if file.name == ".metadata":
        yield io.BytesIO(file.read_bytes())
    elif file.suffix == ".pt":
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.endswith("/data.pkl"):
                    yield io.BytesIO(archive.read(name))
    elif file.suffix == ".distcp" and os.path.getsize(file) > 0:
        with file.open("rb") as opened:
            head = opened.read(_HEAD)
        if head[:4] != b"PK\x03\x04" and file.parent.name == _FSDP:
            raise ValueError("it does not begin with a tensor")
        # the first tensor of the file, whose first entry is its pickle
        if head[:4] == b"PK\x03\x04":
            start = (
                30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            )
            yield io.BytesIO(head[start:])
