"""The engine side of the delta transport, which runs in the process of the engine.

SGLang calls :func:`load`, the import path given with ``--custom-weight-loader``, when a tensor
update has it as its format. The embedded engine does the same. An exception in the loader would end
SGLang's scheduler, so the outcome is written to a file instead, which the sender reads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from slime.engines.payload import NamedTensor
from slime.plugins.delta.delta import Changes, HostBucket, HostCopy, digests, unpack
from slime.plugins.delta.node_copy import (
    Announcement,
    Node,
    open_buckets,
    shared_buckets,
    take_turns,
    touched_names,
)
from slime.plugins.delta.published import Manifest, PublishedBucket, Request, Status, read_request
from slime.weights.transports.shared_memory import pin

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_READERS = 8
_Touched = dict[int, set[str]]
"""The names of the changed tensors, by index of the bucket."""


class ReceivingModel(Protocol):
    """The type of models that receive weights: a model of SGLang, or the weights of the embedded
    engine.
    """

    def load_weights(self, weights: Iterable[NamedTensor], /) -> object:
        """Copy tensors, which have the names in the checkpoint, into the model."""


_held: WeakKeyDictionary[ReceivingModel, HostCopy] = WeakKeyDictionary()
"""The host copy from which each model in this process was last loaded."""


class DamagedFiles(ValueError):
    """The decoded bytes are not those that were sent."""


def load(model: ReceivingModel, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> Status:
    """Load a published version into ``model``, write a report, and return it. SGLang ignores the
    return value.

    Args:
        named_tensors: One pair of a request (see :mod:`slime.plugins.delta.published`) and an empty
            tensor on the device of the model.
    """
    ((text, place),) = named_tensors
    start = time.perf_counter()
    prefix = None
    try:
        request = read_request(text)
        prefix = request.prefix
        status = _load_shared(model, request, place.device) if request.ranks > 1 else None
        if status is None:
            status = _load(model, request.folder, place.device)
    except Exception as error:
        # copy and model may be a mix of versions, so the next load needs a full version
        _held.pop(model, None)
        status = Status("failed", f"{type(error).__name__}: {error}")
    status.seconds = time.perf_counter() - start
    try:
        if prefix is None:
            raise OSError("the request names no place for the report")
        status.write(prefix)
    # the sender has given up and removed the folder of reports, or the disk is full
    except OSError as error:
        logger.error(
            "the outcome %s (%s) could not be reported: %s", status.outcome, status.message, error
        )
    return status


def _load_shared(model: ReceivingModel, request: Request, device: torch.device) -> Status | None:
    """Load with one host copy for all ranks on the node. Return None if each rank has to keep its
    own copy.
    """
    import torch

    manifest = Manifest.read(request.folder)
    copy = HostCopy(shared=True) if manifest.base_version is None else _held.get(model)
    if copy is None or copy.version != manifest.base_version:
        # the ranks that have the base continue without this
        return Status("wrong_base", _wrong_base(copy, manifest))
    if not copy.shared:
        return None

    def take_in() -> Announcement:
        # until everything is verified, so that the copy has no version after a failure
        copy.version = None
        if manifest.base_version is not None:
            changed = _take_delta(copy, manifest, request.folder, torch.device("cpu"))
            return Announcement("ready", touched=touched_names(changed))
        try:
            copy.buckets, handles = shared_buckets(manifest.buckets)
        except MemoryError as error:
            return Announcement("alone", str(error))
        changed = _fill(copy, manifest, request.folder)
        return Announcement("ready", touched=touched_names(changed), buffers=handles)

    # The first rank of the node reads the files; the others wait for what it announces.
    said, first = take_turns(Node(request.prefix, request.seconds), take_in)
    if said.outcome == "alone":
        logger.warning(
            "each rank keeps its own copy of the weights, because they cannot share one: %s",
            said.message,
        )
        return None
    if said.outcome != "ready":
        raise DamagedFiles(said.message)
    # After a full version there are new buffers, which each rank maps and registers with its own
    # CUDA context.
    copy.version = None
    if not first and said.buffers is not None:
        copy.buckets = open_buckets(manifest.buckets, said.buffers)
    if said.buffers is not None:
        for bucket in copy.buckets:
            pin(bucket, device)
    for held, sent in zip(copy.buckets, manifest.buckets, strict=True):
        held.digests = {entry.name: sent.digests[entry.name] for entry in sent.entries}
    # Each rank writes what has changed into its own part of the model.
    tensors = _write(
        model, copy, {index: set(names) for index, names in said.touched.items()}, device
    )
    copy.version = manifest.version
    _held[model] = copy
    return Status("loaded", manifest.version, tensors)


def _wrong_base(copy: HostCopy | None, manifest: Manifest) -> str:
    held = None if copy is None else copy.version
    return (
        f"the engine has {held or 'no version'}, but the delta is relative to "
        f"{manifest.base_version}"
    )


def _load(model: ReceivingModel, folder: Path, device: torch.device) -> Status:
    manifest = Manifest.read(folder)
    copy = _held.get(model)
    if manifest.base_version is None:
        _held[model] = copy = HostCopy()
        touched = _take_full(copy, manifest, folder, device)
    else:
        if copy is None or copy.version != manifest.base_version:
            return Status("wrong_base", _wrong_base(copy, manifest))
        # if the delta fails halfway, copy and model are a mix that needs a full version
        copy.version = None
        touched = _take_delta(copy, manifest, folder, device)
    tensors = _write(model, copy, touched, device)
    copy.version = manifest.version
    return Status("loaded", manifest.version, tensors)


def _take_full(copy: HostCopy, manifest: Manifest, folder: Path, device: torch.device) -> _Touched:
    for index, bucket in enumerate(manifest.buckets):
        copy.allocate(index, bucket.entries, bucket.size, device)
    return _fill(copy, manifest, folder)


def _fill(copy: HostCopy, manifest: Manifest, folder: Path) -> _Touched:
    """Read a full version into the buckets, which must have its layout, and verify it."""
    from safetensors import safe_open

    touched = {}
    for index, bucket in enumerate(manifest.buckets):
        ours = copy.buckets[index]
        assert bucket.file is not None
        with safe_open(folder / bucket.file, framework="pt") as file:
            for name, view in ours.tensors():
                view.copy_(file.get_tensor(name))
        touched[index] = _verify(ours, bucket, manifest.checksum)
    return touched


def _take_delta(copy: HostCopy, manifest: Manifest, folder: Path, device: torch.device) -> _Touched:
    """Apply a delta to the copy and verify it. The model is changed later, after all buckets are
    verified.
    """
    changed = [
        (index, bucket) for index, bucket in enumerate(manifest.buckets) if bucket.file is not None
    ]
    for index, bucket in enumerate(manifest.buckets):
        known = index < len(copy.buckets) and copy.buckets[index].entries == bucket.entries
        if not known or copy.buckets[index].flat.numel() != bucket.size:
            raise DamagedFiles(
                f"bucket {index} has other tensors than in version {manifest.base_version}"
            )

    def read(bucket: PublishedBucket) -> Changes:
        assert bucket.file is not None
        return unpack(
            (folder / bucket.file).read_bytes(), bucket.changed, bucket.dense, bucket.size
        )

    # Reading and decompressing (zstd), patching (on the device) and hashing overlap: while one
    # bucket is patched, threads read later buckets and hash earlier ones.
    with ThreadPoolExecutor(_READERS) as pool:
        reading = [pool.submit(read, bucket) for _, bucket in changed]
        checking = {}
        for (index, bucket), changes in zip(changed, reading, strict=True):
            copy.patch(index, changes.result(), manifest.encoding, device)
            checking[index] = pool.submit(_verify, copy.buckets[index], bucket, manifest.checksum)
        return {index: names.result() for index, names in checking.items()}


def _verify(ours: HostBucket, sent: PublishedBucket, checksum: str) -> set[str]:
    """Check the digests of a bucket, and return the names of the tensors that changed."""
    held = digests(ours, checksum)
    wrong = [name for name, digest in held.items() if sent.digests.get(name) != digest]
    if wrong:
        raise DamagedFiles(
            f"{len(wrong)} tensors differ from those that were sent, for example {wrong[0]}"
        )
    touched = {name for name, digest in held.items() if ours.digests.get(name) != digest}
    ours.digests = held
    return touched


def _write(model: ReceivingModel, copy: HostCopy, touched: _Touched, device: torch.device) -> int:
    count = 0
    for index, names in touched.items():
        bucket = copy.buckets[index]
        if not names:
            continue
        moved = bucket.tensors(bucket.flat.to(device, non_blocking=True))
        tensors = [(name, tensor) for name, tensor in moved if name in names]
        model.load_weights(tensors)
        count += len(tensors)
    if device.type == "cuda":
        import torch

        # The next version is written to the same host memory, so the copies from it must be
        # complete.
        torch.cuda.current_stream(device).synchronize()
    return count
