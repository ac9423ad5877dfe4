"""Published versions of the weights: the manifest of a version, requests to load it, and the
reports of engines.

A full version is a Hugging Face folder with one safetensors file per bucket. A delta has one
compressed file per bucket. Both have a manifest with the place of each tensor in its bucket and
with its digest.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from slime.engines.payload import ALIGNMENT, Entry

MANIFEST = "slime_weights.json"
Encoding = Literal["xor", "overwrite"]
"""Whether a delta has a changed byte as (old xor new), or as its new value."""
_STATUS = re.compile(r"\.reports-[0-9a-f]{8}/[0-9]+", re.ASCII)


@dataclass
class PublishedBucket:
    """One bucket of a version."""

    file: str | None  # None in a delta without changes in this bucket
    size: int  # bytes of the flat buffer
    entries: list[Entry]
    digests: dict[str, str]
    changed: int = 0  # the number of changed bytes
    dense: bool = False  # whether all bytes are sent

    def check(self) -> None:
        """Raise :class:`ValueError` if the file is in another folder or the tensors do not fit into
        ``size`` bytes.
        """
        if self.file is not None and (
            Path(self.file).name != self.file or self.file in (".", "..")
        ):
            raise ValueError(f"{MANIFEST} names {self.file!r}, which is not a file in its folder")
        end = 0
        for entry in self.entries:
            if entry.offset < end or entry.nbytes != entry.size_of_values():
                raise ValueError(
                    f"{MANIFEST} is wrong: {entry.name} has {entry.nbytes} bytes at {entry.offset}"
                )
            end = entry.offset + entry.nbytes
        if (
            not end <= self.size <= end + ALIGNMENT * len(self.entries)
            or not 0 <= self.changed <= self.size
        ):
            raise ValueError(
                f"{MANIFEST} is wrong: {self.size} bytes do not fit tensors that end at byte {end}"
            )


@dataclass
class Manifest:
    """The description of one version, stored in its folder."""

    version: str
    base_version: str | None  # the version that a delta is relative to; None for a full version
    encoding: Encoding
    checksum: str
    buckets: list[PublishedBucket] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check a manifest. Raises :class:`OSError` if there is none, :class:`ValueError`
        if it is wrong.
        """
        said = json.loads((folder / MANIFEST).read_text())
        buckets = [
            PublishedBucket(
                **{
                    **b,
                    "entries": [Entry(**{**e, "shape": tuple(e["shape"])}) for e in b["entries"]],
                }
            )
            for b in said["buckets"]
        ]
        for bucket in buckets:
            bucket.check()
        return cls(**{**said, "buckets": buckets})


@dataclass
class Status:
    """The outcome of loading a version on one rank of an engine.

    Attributes:
        outcome: ``loaded``; or ``wrong_base``, if the rank has another version than the one that
            the delta is relative to, and changed nothing; or ``failed``, if the files were damaged
            or did not fit. In the last case the model is unchanged too, unless the engine itself
            failed while it loaded tensors.
        tensors: The number of loaded tensors.
    """

    outcome: Literal["loaded", "wrong_base", "failed"]
    message: str
    tensors: int = 0
    seconds: float = 0.0

    def write(self, prefix: str) -> None:
        """Write the report to a new file. Its name is random, because ranks on several nodes may
        have the same pid.
        """
        path = Path(f"{prefix}.{secrets.token_hex(8)}.json")
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)))
        os.replace(temporary, path)

    @classmethod
    def read(cls, prefix: str) -> list[Status]:
        """Return the reports of all ranks under ``prefix``."""
        place = Path(prefix)
        return [
            cls(**json.loads(path.read_text()))
            for path in sorted(place.parent.glob(f"{place.name}.*.json"))
        ]


def reports_folder() -> str:
    """Return a new name for a folder of reports, which is created next to the published
    versions.
    """
    return f".reports-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Request:
    """A request to an engine to load a version.

    Attributes:
        folder: The folder of the published version.
        prefix: The prefix of the paths of report files.
        ranks: The number of ranks of the engine. If there are several, those on the same node share
            a host copy.
        seconds: How long a rank waits for another one.
    """

    folder: Path
    prefix: str
    ranks: int = 1
    seconds: float = 600.0


def request(folder: Path, reports: str, number: int, ranks: int = 1, seconds: float = 600.0) -> str:
    """Encode a request to an engine.

    Args:
        folder: The folder of the version to load.
        reports: A name from :func:`reports_folder`. The sender creates this folder in
            ``folder.parent``.
        number: The number of the engine, which is part of the names of its reports.
        ranks: The number of tensor-parallel ranks of the engine.
        seconds: How long a rank waits for another one.
    """
    status = f"{reports}/{number}"
    return json.dumps({"folder": str(folder), "status": status, "ranks": ranks, "seconds": seconds})


def read_request(text: str) -> Request:
    """Decode a request made by :func:`request`.

    Raises:
        ValueError: The report would not be written to a folder of reports next to the published
            version.
    """
    said = json.loads(text)
    folder = Path(said["folder"])
    status = said["status"]
    if not isinstance(status, str) or not _STATUS.fullmatch(status):
        raise ValueError(f"status {status!r} does not have the form .reports-xxxxxxxx/n")
    reports = folder.parent / status.partition("/")[0]
    if reports.is_symlink():
        raise ValueError(f"{reports} is a symbolic link")
    return Request(
        folder,
        str(folder.parent / status),
        int(said.get("ranks", 1)),
        float(said.get("seconds", 600.0)),
    )
