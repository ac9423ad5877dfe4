"""Save and load tensors as rectangles that ranks have, in torch's distributed checkpoint (DCP)
format.

Each rank writes its rectangles to its own file, without a gather and with one tensor in memory at a
time. They can be loaded with any other division of the same tensors: each rank reads the parts that
overlap its rectangles.
"""

from __future__ import annotations

import dataclasses
import io
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slime.backends.offload import host_tensors
from slime.backends.tensor_index import require_tensors
from slime.checkpoint.files import DigestedFile, FileEntry, describe_files
from slime.data.plain_values import save_value

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and sizes of a rectangle."""


class TensorShard(NamedTuple):
    """A rectangle of a tensor, and its memory on this rank."""

    name: str
    """The name of the whole tensor."""
    data: Tensor
    """The values, with the shape of the rectangle."""
    offsets: tuple[int, ...]
    full_shape: tuple[int, ...]
    may_be_padded: bool = False
    """Whether the first axis of the stored tensor may have another length. Missing rows are not
    changed in memory.
    """


def boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Divide the elements ``start`` to ``end`` of a tensor, in row-major order, into rectangles.

    A tensor of ``n`` dimensions needs up to ``2 n - 1`` rectangles: the rest of a row, whole rows,
    and the beginning of a row, where each incomplete row is divided in the same way.
    """
    if start >= end:
        return []
    if len(shape) <= 1:
        return [((start,), (end - start,))] if shape else [((), ())]
    row = math.prod(shape[1:])
    first = start // row
    last = end // row
    if first == last:
        return [_in_row(first, box) for box in boxes(shape[1:], start % row, end % row)]
    found = []
    if start % row:
        found += [_in_row(first, box) for box in boxes(shape[1:], start % row, row)]
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if end % row:
        found += [_in_row(last, box) for box in boxes(shape[1:], 0, end % row)]
    return found


def _in_row(index: int, box: Box) -> Box:
    offsets, sizes = box
    return (index, *offsets), (1, *sizes)


def share(numel: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return start and end of a rank's part if a flat tensor is divided equally among ranks."""
    return numel * rank // ranks, numel * (rank + 1) // ranks


class ShardMemory:
    """CPU memory for copies of a rank's shards, which is kept from one save to the next.

    Allocating memory takes longer than copying: the kernel clears it page by page, and memory for
    copies from CUDA is pinned.
    """

    def __init__(self) -> None:
        self._kinds: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self.tensors: list[Tensor] = []
        self._taking: threading.Thread | None = None

    @property
    def is_taken(self) -> bool:
        return self._taking is not None or bool(self._kinds)

    def take(self, shards: Iterable[TensorShard]) -> None:
        """Allocate and clear memory for such shards on a new thread, so that :meth:`copied` only
        has to copy.
        """
        like = [shard.data.detach() for shard in shards]

        def get() -> None:
            for device in {tensor.device for tensor in like if tensor.is_cuda}:
                torch.cuda.set_device(device)  # a new thread starts with device 0
            tensors = host_tensors(like)
            for tensor in tensors:
                tensor.zero_()
            self.tensors = tensors
            self._kinds = _kinds(like)

        self._taking = threading.Thread(target=get, name="save-memory", daemon=True)
        self._taking.start()

    @torch.no_grad()
    def copied(self, shards: Iterable[TensorShard]) -> list[TensorShard]:
        """Copy shards to this memory, so that training can continue. Copies of the last call are
        overwritten.
        """
        if self._taking is not None:
            self._taking.join()
            self._taking = None
        shards = list(shards)
        kinds = _kinds([shard.data for shard in shards])
        if kinds != self._kinds:
            self.tensors.clear()  # frees the old memory before new memory is allocated
            self.tensors = host_tensors([shard.data.detach() for shard in shards])
            self._kinds = kinds
        for tensor, shard in zip(self.tensors, shards, strict=True):
            tensor.copy_(shard.data, non_blocking=True)
        if any(shard.data.is_cuda for shard in shards):
            torch.cuda.synchronize()
        return [
            shard._replace(data=tensor) for tensor, shard in zip(self.tensors, shards, strict=True)
        ]


def _kinds(tensors: Iterable[Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


@contextmanager
def _causes_named(folder: Path) -> Iterator[None]:
    """Convert torch's exception, which is not an ``Exception`` and whose message does not contain
    the causes.
    """
    try:
        yield
    except dcp.CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise RuntimeError(f"{folder}: {causes}") from error


# --- writing -------------------------------------------------------------------------------------


def write_shards(
    shards: Sequence[TensorShard], folder: Path, root: Path, group: ProcessGroup | None = None
) -> list[FileEntry]:
    """Write ``folder`` with all ranks of ``group``. This is a collective operation.

    Returns:
        This rank's files with their digests, after they are synced to disk. The paths are relative
        to ``root``.

    Raises:
        RuntimeError: A rank failed; or the rectangles of the ranks overlap or do not cover
            everything.
    """
    # The planner has the tensors, so the state dict of the call is empty. In this way, the
    # rectangles of a rank need not be described by DTensors.
    writer = _DigestingWriter(folder)
    with torch.no_grad(), _causes_named(folder):
        dcp.save(
            {},
            storage_writer=writer,
            planner=_ShardSavePlanner(shards),
            process_group=group,
            no_dist=not dist.is_initialized(),
        )
    entries = [file.entry(root) for file in writer.files]
    if not dist.is_initialized() or dist.get_rank() == 0:
        entries += describe_files([folder / ".metadata"], root)
    return entries


class _ShardSavePlanner(DefaultSavePlanner):
    def __init__(self, shards: Sequence[TensorShard]) -> None:
        super().__init__(flatten_state_dict=False)
        self.shards = {(shard.name, shard.offsets): shard for shard in shards}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(shard) for shard in self.shards.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.shards[index.fqn, tuple(index.offset)].data


def _write_item(shard: TensorShard) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(shard.offsets), shard.data.shape)
    properties = TensorProperties(dtype=shard.data.dtype)
    return WriteItem(
        index=MetadataIndex(shard.name, torch.Size(shard.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, properties, torch.Size(shard.full_shape)),
    )


class _DigestingWriter(dcp.FileSystemWriter):
    """Writes one file per rank, and computes its digest at the same time. Unlike torch's writer,
    which keeps a CPU copy of everything until the file is complete, it keeps one tensor."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files: list[DigestedFile] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with DigestedFile(Path(self.path) / name) as file:
                for item in plan.items:
                    start = file.tell()
                    _write_tensor(planner.resolve_data(item), file)
                    length = file.tell() - start
                    results.append(
                        WriteResult(item.index, length, _StorageInfo(name, start, length))
                    )
            self.files.append(file)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _write_tensor(data: Tensor | io.BytesIO, file: DigestedFile) -> None:
    assert isinstance(data, Tensor), "the planner has tensors only"
    save_value(own_storage(data.detach().cpu()), file)


def own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory whose storage is only this tensor: torch.save writes whole
    storages.

    A clone of each view would do as well, but the thread of ``--async-save`` would keep the memory
    of several.
    """
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    if not tensor.numel() or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    memory = tensor.view(-1).view(torch.uint8).numpy()
    return torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)


# --- reading -------------------------------------------------------------------------------------


class StoredTensors:
    """The names, shapes and dtypes of the tensors in a folder.

    Raises:
        ValueError: The index of the folder contains something other than tensors.
        FileNotFoundError: There is no index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        require_tensors(folder)
        found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        stored = {name: x for name, x in found.items() if isinstance(x, TensorStorageMetadata)}
        self.shapes = {name: tuple(x.size) for name, x in stored.items()}
        self.dtypes = {name: x.properties.dtype for name, x in stored.items()}

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def read(self, shards: Sequence[TensorShard]) -> None:
        """Load stored values into the memory of ``shards``, with a cast if the dtypes differ.

        This is a collective operation.

        Raises:
            ValueError: Some names are not stored, or have another shape in the folder.
            RuntimeError: A rank could not read.
        """
        # All differences are collected, because the first one seldom says what is wrong.
        problems = []
        for shard in shards:
            stored = self.shapes.get(shard.name)
            if stored is None:
                problems.append(f"{shard.name} is missing")
            elif stored[1:] != shard.full_shape[1:] or (
                stored != shard.full_shape and not shard.may_be_padded
            ):
                problems.append(
                    f"{shard.name} has shape {stored}, but {shard.full_shape} in the model"
                )
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            if all(problem.startswith("optimizer/") for problem in problems):
                more += " (--no-load-optim leaves the optimizer out)"
            raise ValueError(
                f"{self.folder} does not fit the model: {'; '.join(problems[:5])}{more}"
            )
        with torch.no_grad(), _causes_named(self.folder):
            dcp.load(
                {},
                storage_reader=_TensorReader(self.folder),
                planner=_ShardLoadPlanner(shards),
                no_dist=not dist.is_initialized(),
            )


class _TensorReader(dcp.FileSystemReader):
    """A reader that has one stored tensor in memory at a time. torch's reader keeps a tensor until
    it has read the next one of the same call."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            super().read_data(dataclasses.replace(plan, items=[item]), planner)
        return super().read_data(dataclasses.replace(plan, items=[]), planner)


class _ShardLoadPlanner(DefaultLoadPlanner):
    def __init__(self, shards: Sequence[TensorShard]) -> None:
        super().__init__(flatten_state_dict=False)
        self.by_name: dict[str, list[TensorShard]] = {}
        for shard in shards:
            self.by_name.setdefault(shard.name, []).append(shard)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, shards in self.by_name.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            # numbered, because two shards may be the same rectangle
            for number, shard in enumerate(shards):
                chunk = ChunkStorageMetadata(torch.Size(shard.offsets), shard.data.shape)
                for item in create_read_items_for_chunk_list(name, stored, [chunk]):
                    index = dataclasses.replace(item.dest_index, index=number)
                    items.append(dataclasses.replace(item, dest_index=index))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None
        return self.by_name[index.fqn][index.index].data
