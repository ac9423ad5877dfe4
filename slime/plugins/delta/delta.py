"""Copies of the weights in host memory, the changes between two versions, and the encoding of
changes.

Trainer and engines each keep a :class:`HostCopy`. On the trainer, :meth:`HostCopy.advance` stores
the next version and returns the changes. On the engines, :meth:`HostCopy.patch` applies the
changes. A digest per tensor shows whether both have the same bytes.

Changes are encoded as a stream of gaps, followed by the changed bytes. A gap is the number of
unchanged bytes before a changed byte. It is stored in one byte; the value 255 means 255 unchanged
bytes and that the gap continues. If a quarter of the bytes or more changed, gaps would cost more
than they save, so all bytes are sent. The result is compressed with zstd.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime.engines.payload import Bucket, Entry, NamedTensor, flatten, layout
from slime.plugins.delta.published import Encoding

if TYPE_CHECKING:
    import torch

_DENSE = 0.25  # all bytes are sent if at least this part of them changed
CHUNK = 1 << 26  # bytes that are compared at a time, which bounds the memory for positions
_SKIP = 255
# the level of zstd; a higher one gains little, because gaps and changed bytes are almost random
_LEVEL = 1


@dataclass
class Changes:
    """The changes of one bucket.

    Attributes:
        gaps: The stream of gaps, uint8; None if ``values`` has all bytes of the bucket.
        values: The changed bytes in the chosen encoding, uint8.
        changed: The number of changed bytes.
    """

    gaps: torch.Tensor | None
    values: torch.Tensor
    changed: int

    def pack(self) -> bytes:
        """Return one zstd frame with the gaps followed by the values."""
        import zstandard

        parts = [self.values] if self.gaps is None else [self.gaps, self.values]
        raw = b"".join(part.cpu().numpy().data for part in parts)
        return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(raw)


def unpack(packed: bytes, changed: int, dense: bool, size: int) -> Changes:
    """Decode the result of :meth:`Changes.pack`, for a bucket of ``size`` bytes.

    Raises:
        zstandard.ZstdError: The bytes are damaged.
        ValueError: The decoded size is larger than it can be for such a bucket. In this case
            nothing is allocated.
    """
    import torch
    import zstandard

    # zstandard allocates the size that the frame states; ``max_output_size`` only applies to frames
    # without a size.
    stated = zstandard.frame_content_size(packed)
    limit = size if dense else 2 * changed + size // _SKIP + 1
    if not 0 <= stated <= limit:
        raise ValueError(
            f"the packed changes have {stated} bytes, but a bucket of {size} bytes has at most "
            f"{limit}"
        )
    raw = torch.frombuffer(
        bytearray(zstandard.ZstdDecompressor().decompress(packed)), dtype=torch.uint8
    )
    if dense:
        return Changes(None, raw, changed)
    split = raw.numel() - changed
    return Changes(raw[:split], raw[split:], changed)


@dataclass
class HostBucket:
    """The tensors of one bucket in one buffer. With a GPU the buffer is pinned, so that copies run
    at full speed.
    """

    entries: list[Entry]
    flat: torch.Tensor  # uint8, on the host
    # the digests of the current bytes, by tensor
    digests: dict[str, str] = field(default_factory=dict)

    def tensors(self, flat: torch.Tensor | None = None) -> list[NamedTensor]:
        """Return views into the buffer, or into ``flat``, a copy of the buffer on another
        device.
        """
        return [
            (entry.name, entry.view(self.flat if flat is None else flat)) for entry in self.entries
        ]


@dataclass
class HostCopy:
    """All weights of one version.

    Attributes:
        version: The version; None while the copy is being changed, and after a change that failed.
        shared: Whether the memory is shared with other ranks on the node.
    """

    version: str | None = None
    buckets: list[HostBucket] = field(default_factory=list)
    shared: bool = False

    def advance(self, bucket: Bucket, encoding: Encoding) -> Changes | None:
        """Store the next version of one bucket.

        Returns:
            The changes, or None if there was no such bucket before, or one with another layout.
        """
        entries, size = layout(bucket.tensors)
        device = bucket.tensors[0][1].device
        new = flatten(bucket.tensors, entries, size)
        known = bucket.index < len(self.buckets) and self.buckets[bucket.index].entries == entries
        if not known:
            # The layout differs from here on. Later buckets would differ too, so they are dropped.
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

    def allocate(
        self, index: int, entries: Sequence[Entry], size: int, device: torch.device
    ) -> HostBucket:
        """Allocate the buffer of one bucket. Later buckets are dropped."""
        self.buckets[index:] = [HostBucket(list(entries), _host_buffer(size, device))]
        return self.buckets[index]


def _host_buffer(size: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


# --- changed bytes -------------------------------------------------------------------------------


def compare(old: torch.Tensor, new: torch.Tensor, encoding: Encoding) -> Changes:
    """Return the changes between two flat uint8 buffers of the same size and on the same device."""
    import torch

    # Changed bytes are counted first. Positions are int64, eight times as large as the changed
    # bytes themselves, so they are only computed if they are needed.
    changed = sum(
        int(torch.count_nonzero(a ^ b))
        for a, b in zip(old.split(CHUNK), new.split(CHUNK), strict=True)
    )
    if changed >= _DENSE * new.numel() and changed:
        return Changes(None, old ^ new if encoding == "xor" else new, changed)
    gaps: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    last = -1
    for start in range(0, new.numel(), CHUNK):
        part = new[start : start + CHUNK]
        difference = old[start : start + CHUNK] ^ part
        positions = difference.nonzero().view(-1)
        if positions.numel():
            values.append((difference if encoding == "xor" else part)[positions])
            positions += start
            gaps.append(_gap_stream(positions, last))
            last = int(positions[-1])
    empty = new.new_empty(0)
    return Changes(torch.cat([empty, *gaps]), torch.cat([empty, *values]), changed)


def _gap_stream(positions: torch.Tensor, last: int) -> torch.Tensor:
    """Encode the gaps before sorted ``positions``. ``last`` is the changed position before the
    first of them.
    """
    import torch

    # A gap g is encoded as g // 255 bytes of 255 and one byte g % 255. ``ends`` counts the bytes of
    # 255 up to the end of each gap, so gap i ends at index ends[i] + i of the stream. All other
    # bytes keep the initial value 255.
    gaps = torch.diff(positions, prepend=positions.new_tensor([last])) - 1
    skips = gaps // _SKIP
    ends = skips.cumsum(0)
    stream = torch.full(
        (gaps.numel() + int(ends[-1]),), _SKIP, dtype=torch.uint8, device=gaps.device
    )
    stream[ends + torch.arange(gaps.numel(), device=gaps.device)] = (gaps % _SKIP).to(torch.uint8)
    return stream


def _positions(gaps: torch.Tensor) -> torch.Tensor:
    import torch

    # Each byte advances the position by its value. A byte that ends a gap advances it by one more,
    # for the changed byte itself. So the cumulative sum at the end of a gap is the position plus
    # one.
    stops = gaps != _SKIP
    return (gaps.to(torch.int64) + stops).cumsum(0)[stops] - 1


def apply(flat: torch.Tensor, changes: Changes, encoding: Encoding) -> torch.Tensor:
    """Return the new bytes. ``flat`` may be overwritten.

    Raises:
        ValueError: The changes do not fit the buffer.
    """
    values = changes.values.to(flat.device, non_blocking=True)
    if changes.gaps is None:
        if values.numel() != flat.numel():
            raise ValueError(f"{values.numel()} bytes do not fit a buffer of {flat.numel()} bytes")
        return flat ^ values if encoding == "xor" else values
    positions = _positions(changes.gaps.to(flat.device, non_blocking=True))
    if positions.numel() != values.numel() or (
        positions.numel() and int(positions[-1]) >= flat.numel()
    ):
        raise ValueError(
            f"{positions.numel()} positions, {values.numel()} values do not fit {flat.numel()} "
            "bytes"
        )
    flat[positions] = flat[positions] ^ values if encoding == "xor" else values
    return flat


# --- digests -------------------------------------------------------------------------------------


def digests(bucket: HostBucket, checksum: str) -> dict[str, str]:
    """Return the digest of the bytes of each tensor, by name."""
    digest = digest_function(checksum)
    raw = bucket.flat.numpy().data
    return {
        entry.name: digest(raw[entry.offset : entry.offset + entry.nbytes])
        for entry in bucket.entries
    }


def digest_function(checksum: str) -> Callable[[Any], str]:
    """Return the function for ``--update-weight-delta-checksum``, from bytes to a digest."""
    if checksum == "adler32":
        return lambda raw: f"{zlib.adler32(raw):08x}"
    import xxhash

    return xxhash.xxh3_128_hexdigest
