"""Megatron's process groups, and what is exchanged in them: results of the last stage, and whole
tensors.

Parameters are sent together: a model with 48 layers and 128 experts has 1,536 expert matrices on
each of eight expert-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from torch import Tensor
from torch.distributed import ProcessGroup

from slime.backends.collectives import batched, gather_flat
from slime.config.layout import ParallelLayout
from slime.config.seeds import derive_seed
from slime.plugins.megatron.maps.family import Entry

T = TypeVar("T")


def initialize(layout: ParallelLayout, seed: int, timeout_minutes: int) -> None:
    """Create all groups of a layout. Groups of an earlier layout of this process are destroyed."""
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    with _connected_at_first_use():
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=timeout_minutes,
            # for Megatron's own checkpoints of the distributed optimizer
            create_gloo_process_groups=False,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(derive_seed(seed, "megatron") % 2**31)


@contextmanager
def _connected_at_first_use() -> Iterator[None]:
    """Groups that are created in this context make their NCCL communicator at their first
    collective.

    Megatron creates some thirty groups per rank, of which a layout uses a few. While the default
    group is bound to a device, torch gives each of them a communicator at once, with buffers
    outside of torch's allocator: 7 GiB per GPU with two ranks on H200s.
    """
    world = torch.distributed.group.WORLD
    assert world is not None
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def context_group() -> ProcessGroup | None:
    """Return the group of ranks that have other tokens of the same samples; None without context
    parallelism.
    """
    group = mpu.get_context_parallel_group()
    return group if group.size() > 1 else None


def broadcast_from_last_stage(tensors: list[torch.Tensor]) -> None:
    """Send tensors from the last pipeline stage to all others, which pass tensors of the same
    shapes.
    """
    group = mpu.get_pipeline_model_parallel_group()
    if group.size() == 1 or not tensors:
        return
    flat = torch.cat([x.flatten() for x in tensors])
    torch.distributed.broadcast(flat, src=mpu.get_pipeline_model_parallel_last_rank(), group=group)
    for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.copy_(part.view_as(x))


def object_of_last_stage(value: T) -> T:
    """Return the value of the last pipeline stage on all stages."""
    group = mpu.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return value
    holder = [value]
    torch.distributed.broadcast_object_list(
        holder, src=mpu.get_pipeline_model_parallel_last_rank(), group=group
    )
    return holder[0]


class Piece(NamedTuple):
    """One parameter, or one expert of every expert-parallel rank.

    Attributes:
        stage: The pipeline rank that has it.
        shape: The shape of the part of a tensor-parallel rank, which is known on every rank.
        mine: The part of this rank; None on other stages.
        expert: The index among the experts of a rank; None if it is not an expert.
    """

    entry: Entry
    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    mine: Tensor | None
    expert: int | None

    @property
    def full_shape(self) -> list[int]:
        return list(self.entry.layout.full_shape(list(self.shape), tensor_group(self.entry).size()))

    @property
    def nbytes(self) -> int:
        """The bytes of all whole tensors that belong to it."""
        return self.copies * math.prod(self.full_shape) * self.dtype.itemsize

    @property
    def copies(self) -> int:
        return 1 if self.expert is None else int(mpu.get_expert_model_parallel_group().size())

    @property
    def is_cut(self) -> bool:
        return self.entry.layout.axis is not None and tensor_group(self.entry).size() > 1


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Divide pieces into runs with the same stage, dtype and kind, which can be sent together. The
    result is the same on all ranks."""
    return batched(
        pieces, lambda x: (x.stage, x.dtype, x.expert is None), lambda piece: piece.nbytes
    )


def whole(batch: Sequence[Piece]) -> list[list[Tensor]]:
    """Return for each piece its whole tensors on every rank; for experts, one per expert-parallel
    rank.

    This is a collective operation. Tensors that are not sharded may be the memory of the model.
    """
    shapes = [[piece.copies, *piece.full_shape] for piece in batch]
    if batch[0].mine is not None:
        tensors = _over_experts(_over_tensor_ranks(batch), batch)
    else:
        tensors = [torch.empty(0, dtype=piece.dtype, device=device()) for piece in batch]
    group = mpu.get_pipeline_model_parallel_group()
    if group.size() > 1:
        counts = [math.prod(shape) for shape in shapes]
        # The other stages know the shapes, so that all of them can take part in one broadcast.
        if batch[0].mine is not None:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        else:
            flat = torch.empty(sum(counts), dtype=batch[0].dtype, device=device())
        dist.broadcast(flat, src=dist.get_process_group_ranks(group)[batch[0].stage], group=group)
        tensors = list(flat.split(counts))
    return [
        list(tensor.reshape(shape).unbind(0)) for tensor, shape in zip(tensors, shapes, strict=True)
    ]


def _over_tensor_ranks(batch: Sequence[Piece]) -> list[Tensor]:
    """Return each piece as a whole tensor over tensor-parallel ranks, for this rank's experts."""
    group = tensor_group(batch[0].entry)
    tensors = []
    parts = []
    for piece in batch:
        assert piece.mine is not None
        shape = piece.full_shape
        if piece.is_cut:
            shape[_axis(piece)] //= group.size()
        parts.append(piece.mine.detach().reshape(shape))
    gathered = iter(
        gather_flat([part for part, piece in zip(parts, batch, strict=True) if piece.is_cut], group)
    )
    for part, piece in zip(parts, batch, strict=True):
        tensors.append(torch.cat(list(next(gathered)), _axis(piece)) if piece.is_cut else part)
    return tensors


def _over_experts(tensors: Sequence[Tensor], batch: Sequence[Piece]) -> list[Tensor]:
    """Add the experts of the other expert-parallel ranks, along a new first dimension."""
    group = mpu.get_expert_model_parallel_group()
    if batch[0].expert is None or group.size() == 1:
        return [tensor.unsqueeze(0) for tensor in tensors]
    return gather_flat(tensors, group)


def _axis(piece: Piece) -> int:
    assert piece.entry.layout.axis is not None
    return int(piece.entry.layout.axis)


def tensor_group(entry: Entry) -> ProcessGroup:
    return (
        mpu.get_expert_tensor_parallel_group()
        if entry.experts
        else mpu.get_tensor_model_parallel_group()
    )


def device() -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
