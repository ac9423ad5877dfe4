"""Versions of the weights as folders: how the sender describes them, and what engines report back.

A full version is a Hugging Face folder with one safetensors file per bucket; a delta has one packed file per
bucket. Both carry a manifest that says where each tensor lies in its bucket, and its digest.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from slime.engines.flat import Entry
from slime.weights.delta import Encoding

MANIFEST = "slime_weights.json"


@dataclass
class PublishedBucket:
    """``file`` is None when nothing changed in a delta."""

    file: str | None
    size: int  # bytes of the flat buffer
    entries: list[Entry]
    digests: dict[str, str]
    changed: int = 0  # bytes
    dense: bool = False  # all bytes are sent


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
        said = json.loads((folder / MANIFEST).read_text())
        buckets = [
            PublishedBucket(**{**b, "entries": [Entry(**{**e, "shape": tuple(e["shape"])}) for e in b["entries"]]})
            for b in said["buckets"]
        ]
        return cls(**{**said, "buckets": buckets})


@dataclass
class Status:
    """What one rank of an engine made of a version.

    ``wrong_base``: it holds another version than the delta was made against, and changed nothing.
    ``failed``: the files were damaged or did not fit; it changed nothing, unless the engine itself failed to load.
    """

    outcome: Literal["loaded", "wrong_base", "failed"]
    message: str
    tensors: int = 0
    seconds: float = 0.0

    def write(self, prefix: str) -> None:
        path = Path(f"{prefix}.{os.getpid()}.json")
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)))
        os.replace(temporary, path)

    @classmethod
    def read(cls, prefix: str) -> list[Status]:
        """Of all ranks that reported under ``prefix``."""
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


def request(folder: Path, status: str) -> str:
    """What an engine is told: the folder to load and where to report."""
    return json.dumps({"folder": str(folder), "status": status})


def read_request(text: str) -> dict[str, Any]:
    return dict(json.loads(text))
