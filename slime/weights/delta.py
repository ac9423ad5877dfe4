"""The bytes of a model's weights in host memory, what changed in them between two versions, and how that is packed.

Trainer and engines each keep a :class:`HostCopy`. The trainer's :meth:`HostCopy.advance` takes the next
version in and says what changed; the engines' :meth:`HostCopy.patch` applies that. A digest per tensor tells
whether both arrived at the same bytes.

Packed, changed bytes are a stream of gaps and the bytes themselves. A gap is the number of unchanged bytes
before a changed one, in one byte; 255 stands for 255 unchanged bytes and says that the gap goes on. Where a
quarter of the bytes changed, gaps cost more than they save and all bytes are sent. Both go through zstd.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from slime.engines.flat import Bucket, Entry, NamedTensor, flatten, layout

if TYPE_CHECKING:
    import torch

Encoding = Literal["xor", "overwrite"]
"""Whether a changed byte travels as old xor new, or as it is now."""

_DENSE = 0.25  # share of changed bytes from which on all are sent
_CHUNK = 1 << 26  # bytes that are compared at a time; bounds the memory for positions
_SKIP = 255
_LEVEL = 1  # of zstd: gaps and changed bytes are close to random


@dataclass
class Changes:
    """What changed in one bucket.

    ``gaps`` is None when ``values`` are all bytes of the bucket. Both are uint8, on any device.
    """

    gaps: torch.Tensor | None
    values: torch.Tensor
    changed: int  # bytes

    def pack(self) -> bytes:
        """One zstd frame: the gaps, then the values."""
        import zstandard

        parts = [self.values] if self.gaps is None else [self.gaps, self.values]
        raw = b"".join(part.cpu().numpy().data for part in parts)
        return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(raw)


def unpack(packed: bytes, changed: int, dense: bool, size: int) -> Changes:
    """The inverse of :meth:`Changes.pack`, for a bucket of ``size`` bytes.

    Raises:
        zstandard.ZstdError: the bytes were damaged.
        ValueError: they would unpack to more than a bucket of that size can need; nothing is allocated.
    """
    import torch
    import zstandard

    # The frame says its own size, and zstandard allocates it; ``max_output_size`` counts only where it does not.
    stated, limit = zstandard.frame_content_size(packed), size if dense else 2 * changed + size // _SKIP + 1
    if not 0 <= stated <= limit:
        raise ValueError(f"packed changes of {stated} bytes, where a bucket of {size} bytes can have {limit}")
    raw = torch.frombuffer(bytearray(zstandard.ZstdDecompressor().decompress(packed)), dtype=torch.uint8)
    if dense:
        return Changes(None, raw, changed)
    split = raw.numel() - changed
    return Changes(raw[:split], raw[split:], changed)


@dataclass
class HostBucket:
    """Some tensors end to end in one buffer; pinned where there is a GPU, so that copies run at full speed."""

    entries: list[Entry]
    flat: torch.Tensor  # uint8, on the host
    digests: dict[str, str] = field(default_factory=dict)  # of the tensors as they are

    def tensors(self, flat: torch.Tensor | None = None) -> list[NamedTensor]:
        """Views into the buffer, or into a copy of it on another device."""
        return [(entry.name, entry.view(self.flat if flat is None else flat)) for entry in self.entries]


@dataclass
class HostCopy:
    """All weights of one version. ``version`` is None while it is changed, or after that failed.

    ``shared``: the memory is that of other ranks of the node, too.
    """

    version: str | None = None
    buckets: list[HostBucket] = field(default_factory=list)
    shared: bool = False

    def advance(self, bucket: Bucket, encoding: Encoding) -> Changes | None:
        """Take in the next version of one bucket.

        Returns what changed, or None when there was no such bucket, or another one, before.
        """
        entries, size = layout(bucket.tensors)
        device = bucket.tensors[0][1].device
        new = flatten(bucket.tensors, entries, size)
        known = bucket.index < len(self.buckets) and self.buckets[bucket.index].entries == entries
        if not known:
            # Another layout from here on: later buckets would hold other tensors, too, and are dropped.
            self.buckets[bucket.index :] = [HostBucket(entries, _host_buffer(size, device))]
            changes = None
        else:
            old = self.buckets[bucket.index].flat.to(device, non_blocking=True)
            changes = compare(old, new, encoding)
        self.buckets[bucket.index].flat.copy_(new)
        return changes

    def patch(self, index: int, changes: Changes, encoding: Encoding, device: torch.device) -> None:
        """Apply changes to one bucket, on ``device``."""
        flat = self.buckets[index].flat
        work = flat.to(device, non_blocking=True)
        flat.copy_(apply(work, changes, encoding))

    def allocate(self, index: int, entries: Sequence[Entry], size: int, device: torch.device) -> HostBucket:
        """Room for one bucket; later ones are dropped."""
        self.buckets[index:] = [HostBucket(list(entries), _host_buffer(size, device))]
        return self.buckets[index]


def _host_buffer(size: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


# --- changed bytes -------------------------------------------------------------------------------


def compare(old: torch.Tensor, new: torch.Tensor, encoding: Encoding) -> Changes:
    """What changed between two flat uint8 buffers of one size and device."""
    import torch

    # Counted first: positions are int64, eight times the bytes of what changed, so they are made only where they pay.
    changed = sum(int(torch.count_nonzero(a ^ b)) for a, b in zip(old.split(_CHUNK), new.split(_CHUNK), strict=True))
    if changed >= _DENSE * new.numel() and changed:
        return Changes(None, old ^ new if encoding == "xor" else new, changed)
    gaps: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    last = -1
    for start in range(0, new.numel(), _CHUNK):
        part = new[start : start + _CHUNK]
        difference = old[start : start + _CHUNK] ^ part
        positions = difference.nonzero().view(-1)
        if positions.numel():
            values.append((difference if encoding == "xor" else part)[positions])
            positions += start
            gaps.append(_gap_stream(positions, last))
            last = int(positions[-1])
    empty = new.new_empty(0)
    return Changes(torch.cat([empty, *gaps]), torch.cat([empty, *values]), changed)


def _gap_stream(positions: torch.Tensor, last: int) -> torch.Tensor:
    """Gaps before sorted ``positions``, of which the one before them was ``last``; see the module."""
    import torch

    # A gap of g becomes g // 255 bytes of 255 and one byte g % 255. ``ends`` counts the 255s up to each gap, so gap i
    # ends at index ends[i] + i of the stream; every other place keeps the 255 that it was filled with.
    gaps = torch.diff(positions, prepend=positions.new_tensor([last])) - 1
    skips = gaps // _SKIP
    ends = skips.cumsum(0)
    stream = torch.full((gaps.numel() + int(ends[-1]),), _SKIP, dtype=torch.uint8, device=gaps.device)
    stream[ends + torch.arange(gaps.numel(), device=gaps.device)] = (gaps % _SKIP).to(torch.uint8)
    return stream


def _positions(gaps: torch.Tensor) -> torch.Tensor:
    import torch

    # Each byte moves on by its value, and a byte that ends a gap by one more: the changed byte itself. The running sum
    # at the ends of gaps is therefore the position plus one.
    stops = gaps != _SKIP
    return (gaps.to(torch.int64) + stops).cumsum(0)[stops] - 1


def apply(flat: torch.Tensor, changes: Changes, encoding: Encoding) -> torch.Tensor:
    """The new bytes; ``flat`` may be written to.

    Raises:
        ValueError: the changes do not fit the buffer.
    """
    values = changes.values.to(flat.device, non_blocking=True)
    if changes.gaps is None:
        if values.numel() != flat.numel():
            raise ValueError(f"{values.numel()} bytes for a buffer of {flat.numel()}")
        return flat ^ values if encoding == "xor" else values
    positions = _positions(changes.gaps.to(flat.device, non_blocking=True))
    if positions.numel() != values.numel() or (positions.numel() and int(positions[-1]) >= flat.numel()):
        raise ValueError(f"{positions.numel()} positions and {values.numel()} bytes for a buffer of {flat.numel()}")
    flat[positions] = flat[positions] ^ values if encoding == "xor" else values
    return flat


# --- digests -------------------------------------------------------------------------------------


def digests(bucket: HostBucket, checksum: str) -> dict[str, str]:
    """Digest of each tensor's bytes, by name."""
    digest = digest_function(checksum)
    raw = bucket.flat.numpy().data
    return {entry.name: digest(raw[entry.offset : entry.offset + entry.nbytes]) for entry in bucket.entries}


def digest_function(checksum: str) -> Callable[[Any], str]:
    """``--update-weight-delta-checksum`` as a function of bytes."""
    if checksum == "adler32":
        return lambda raw: f"{zlib.adler32(raw):08x}"
    import xxhash

    return xxhash.xxh3_128_hexdigest
