"""Versions of the weights as folders: how the sender describes them, and what engines report back.

A full version is a Hugging Face folder with one safetensors file per bucket; a delta has one packed file per
bucket. Both carry a manifest that says where each tensor lies in its bucket, and its digest.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from slime.engines.flat import ALIGNMENT, Entry
from slime.weights.delta import Encoding

MANIFEST = "slime_weights.json"
_STATUS = re.compile(r"\.reports-[0-9a-f]{8}/[0-9]+", re.ASCII)


@dataclass
class PublishedBucket:
    """``file`` is None when nothing changed in a delta."""

    file: str | None
    size: int  # bytes of the flat buffer
    entries: list[Entry]
    digests: dict[str, str]
    changed: int = 0  # bytes
    dense: bool = False  # all bytes are sent

    def check(self) -> None:
        """Raises :class:`ValueError` for a file elsewhere, and for tensors that are not laid out in ``size`` bytes."""
        if self.file is not None and (Path(self.file).name != self.file or self.file in (".", "..")):
            raise ValueError(f"{MANIFEST} names {self.file!r}, which is no file of its folder")
        end = 0
        for entry in self.entries:
            if entry.offset < end or entry.nbytes != entry.size_of_values():
                raise ValueError(f"{MANIFEST}: {entry.name} has {entry.nbytes} bytes at {entry.offset}")
            end = entry.offset + entry.nbytes
        if not end <= self.size <= end + ALIGNMENT * len(self.entries) or not 0 <= self.changed <= self.size:
            raise ValueError(f"{MANIFEST}: {self.size} bytes for tensors that end at {end}")


@dataclass
class Manifest:
    """``base_version`` is None for a full version."""

    version: str
    base_version: str | None
    encoding: Encoding
    checksum: str
    buckets: list[PublishedBucket] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises :class:`OSError` without a manifest, and :class:`ValueError` for one that cannot be true."""
        said = json.loads((folder / MANIFEST).read_text())
        buckets = [
            PublishedBucket(**{**b, "entries": [Entry(**{**e, "shape": tuple(e["shape"])}) for e in b["entries"]]})
            for b in said["buckets"]
        ]
        for bucket in buckets:
            bucket.check()
        return cls(**{**said, "buckets": buckets})


@dataclass
class Status:
    """The outcome of loading a version on one rank of an engine.

    ``wrong_base``: it holds another version than the delta was made against, and changed nothing.
    ``failed``: the files were damaged or did not fit; it changed nothing, unless the engine itself failed to load.
    """

    outcome: Literal["loaded", "wrong_base", "failed"]
    message: str
    tensors: int = 0
    seconds: float = 0.0

    def write(self, prefix: str) -> None:
        """Into a new file. Ranks on different nodes may have the same process id, so its name is random."""
        path = Path(f"{prefix}.{secrets.token_hex(8)}.json")
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)))
        os.replace(temporary, path)

    @classmethod
    def read(cls, prefix: str) -> list[Status]:
        """The reports of all ranks under ``prefix``."""
        place = Path(prefix)
        return [cls(**json.loads(path.read_text())) for path in sorted(place.parent.glob(f"{place.name}.*.json"))]


@asynccontextmanager
async def publishing(folder: Path, name: str) -> AsyncIterator[Path]:
    """A folder to write into, which becomes ``folder/name`` at the end: a reader sees all of it or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
    aside.mkdir()
    try:
        yield aside
        await asyncio.to_thread(_publish, aside, folder / name)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _publish(aside: Path, final: Path) -> None:
    # Files and their folder are on the disk before the new name is, so that after a crash of the machine a reader finds
    # either no such version or all of it.
    for path in [*aside.iterdir(), aside]:
        _fsync(path)
    if final.exists():  # the same version again, after a sync that failed
        shutil.rmtree(final)
    os.replace(aside, final)
    _fsync(final.parent)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def reports_folder() -> str:
    """A new name for a folder of reports, beside the published versions."""
    return f".reports-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Request:
    """What an engine is asked to load.

    Attributes:
        folder: of the published version.
        prefix: of the files to report in.
        ranks: of the engine; with several, those of one node share a host copy.
        seconds: how long a rank waits for another one.
    """

    folder: Path
    prefix: str
    ranks: int = 1
    seconds: float = 600.0


def request(folder: Path, reports: str, number: int, ranks: int = 1, seconds: float = 600.0) -> str:
    """The request to an engine: the folder to load, and the name beside it under which to report.

    Args:
        reports: a name from :func:`reports_folder`; the sender makes the folder in ``folder.parent``.
        number: of the engine.
        ranks: tensor-parallel ranks of the engine.
        seconds: how long a rank waits for another one.
    """
    status = f"{reports}/{number}"
    return json.dumps({"folder": str(folder), "status": status, "ranks": ranks, "seconds": seconds})


def read_request(text: str) -> Request:
    """The inverse of :func:`request`.

    Raises:
        ValueError: the report would not lie in a folder of reports beside the published version.
    """
    said = json.loads(text)
    folder, status = Path(said["folder"]), said["status"]
    if not isinstance(status, str) or not _STATUS.fullmatch(status):
        raise ValueError(f"status {status!r} does not have the form .reports-xxxxxxxx/n")
    reports = folder.parent / status.partition("/")[0]
    if reports.is_symlink():
        raise ValueError(f"{reports} is a symbolic link")
    return Request(folder, str(folder.parent / status), int(said.get("ranks", 1)), float(said.get("seconds", 600.0)))
