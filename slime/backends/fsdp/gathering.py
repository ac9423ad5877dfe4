"""Gather whole tensors from FSDP's shards, many at a time.

``DTensor.full_tensor`` is one collective per parameter, and launches then cost more than the
transfer: a model with 64 layers has about 700 parameters, most of them small. So consecutive
parameters share one all-gather, up to ``BATCH_BYTES`` of whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The older name is deprecated in torch 2.13."""
# of whole tensors; gathering needs about twice as much memory for a short time
BATCH_BYTES = 1 << 28


def whole_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors in the given order. This is a collective operation if some tensors are
    ``DTensor``.

    Tensors that are not sharded are yielded unchanged, so they may be the caller's memory. Sharded
    tensors with the same dtype and the same mesh share an all-gather, even if there are others
    between them. All ranks must pass the same names in the same order.
    """
    batch: list[tuple[str, Tensor]] = []
    kind: object = None
    size = 0
    for name, tensor in named:
        dim = _shard_dim(tensor)
        if dim is None and not batch:
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            continue
        this = (tensor.device_mesh, dim, tensor.dtype) if isinstance(tensor, DTensor) else kind
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        if batch and (this != kind or size + nbytes > BATCH_BYTES):
            yield from _gathered(batch)
            batch = []
            size = 0
        batch.append((name, tensor))
        kind = this
        size = size + nbytes
    yield from _gathered(batch)


def _shard_dim(tensor: Tensor) -> int | None:
    """Return the mesh dimension along which the rows of a tensor are sharded, if it is replicated
    along the others.

    FSDP shards in this way. The result is None for any other tensor.
    """
    if not isinstance(tensor, DTensor):
        return None
    rows = [
        dim
        for dim, placement in enumerate(tensor.placements)
        if type(placement) is Shard and placement.dim == 0
    ]
    copies = sum(isinstance(placement, Replicate) for placement in tensor.placements)
    return rows[0] if len(rows) == 1 and copies == len(tensor.placements) - 1 else None


def _gathered(batch: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole tensors of one batch in order."""
    whole = _all_gather(
        [
            tensor
            for _, tensor in batch
            if isinstance(tensor, DTensor) and _shard_dim(tensor) is not None
        ]
    )
    for name, tensor in batch:
        if not isinstance(tensor, DTensor):
            yield name, tensor
        else:
            yield name, next(whole) if _shard_dim(tensor) is not None else tensor.full_tensor()


def _all_gather(tensors: Sequence[DTensor]) -> Iterator[Tensor]:
    """Gather tensors with the same mesh, mesh dimension and dtype in one collective.

    With ``Shard(0)``, rank ``i`` of ``n`` has the rows from ``i * ceil(rows / n)`` on, so the last
    ranks may have fewer or none. Every rank sends ``ceil(rows / n)`` rows of each tensor, and the
    surplus rows are removed afterwards.
    """
    if not tensors:
        return
    dim = _shard_dim(tensors[0])
    assert dim is not None
    group = tensors[0].device_mesh.get_group(dim)
    ranks = group.size()
    if ranks == 1:
        yield from (tensor.to_local() for tensor in tensors)
        return
    # FSDP pads the last shards only for its own collectives; `to_local` has no padding. All ranks
    # must send the same number of elements, so the shards are padded here.
    shapes = [(-(-tensor.shape[0] // ranks), *tensor.shape[1:]) for tensor in tensors]
    counts = [math.prod(shape) for shape in shapes]
    mine = torch.empty(sum(counts), dtype=tensors[0].dtype, device=tensors[0].device)
    for tensor, part in zip(tensors, mine.split(counts), strict=True):
        shard = tensor.to_local().reshape(-1)
        part[: shard.numel()].copy_(shard)
    everyones = torch.empty(ranks * sum(counts), dtype=mine.dtype, device=mine.device)
    all_gather_flat(everyones, mine, group=group)
    del mine
    by_rank = everyones.view(ranks, -1).split(counts, dim=1)
    for parts, shape, tensor in zip(by_rank, shapes, tensors, strict=True):
        # This is a copy (unless the tensor is alone in the batch), so a receiver that keeps one
        # does not keep all.
        yield parts.reshape(ranks * shape[0], *shape[1:])[: tensor.shape[0]]
