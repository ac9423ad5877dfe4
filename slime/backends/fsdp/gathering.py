"""Gather whole tensors from FSDP's shards, many at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from slime.backends.collectives import batched, gather_flat


def whole_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors in the given order. This is a collective operation if some tensors are
    ``DTensor``.

    Tensors that are not sharded are yielded unchanged, so they may be the caller's memory. Sharded
    tensors with the same dtype and the same mesh share an all-gather, even if there are others
    between them. All ranks must pass the same names in the same order.
    """
    for batch in batched(named, _kind, lambda one: math.prod(one[1].shape) * one[1].itemsize):
        sharded = [x for _, x in batch if isinstance(x, DTensor) and _shard_dims(x)]
        whole = _all_gather(sharded)
        for name, tensor in batch:
            if not isinstance(tensor, DTensor):
                yield name, tensor
            else:
                yield name, next(whole) if _shard_dims(tensor) else tensor.full_tensor()


def _kind(named: tuple[str, Tensor]) -> object:
    """Return what tensors of one all-gather have in common; None for one that takes part in
    none.
    """
    tensor = named[1]
    dims = _shard_dims(tensor)
    if not isinstance(tensor, DTensor) or not dims:
        return None
    return tensor.device_mesh, dims, tensor.dtype


def _shard_dims(tensor: Tensor) -> tuple[int, ...]:
    """Return the mesh dimensions along which the rows of a tensor are sharded, in the order in
    which shards are joined, if it is replicated along the others; () for any other tensor.

    FSDP shards along one. Experts are divided along the last one first, and along another one FSDP
    shards what a rank has of them, which torch calls a strided shard.
    """
    if not isinstance(tensor, DTensor):
        return ()
    places = [x for x in enumerate(tensor.placements) if not isinstance(x[1], Replicate)]
    kinds = [type(placement) for _, placement in places]
    if kinds not in ([Shard], [_StridedShard, Shard]):
        return ()
    of_rows = all(getattr(placement, "dim", None) == 0 for _, placement in places)
    return tuple(dim for dim, _ in places) if of_rows else ()


def _all_gather(tensors: Sequence[DTensor]) -> Iterator[Tensor]:
    """Gather tensors with the same mesh, mesh dimensions and dtype in one collective for each
    dimension.

    With ``Shard(0)``, rank ``i`` of ``n`` has the rows from ``i * ceil(rows / n)`` on, so the last
    ranks may have fewer or none. Every rank sends ``ceil(rows / n)`` rows of each tensor, and the
    surplus rows are removed afterwards. Experts have no surplus.
    """
    if not tensors:
        return
    mesh = tensors[0].device_mesh
    dims = [dim for dim in _shard_dims(tensors[0]) if mesh.size(dim) > 1]
    parts = [tensor.to_local() for tensor in tensors]
    if not dims:
        yield from parts
        return
    # FSDP pads the last shards only for its own collectives; `to_local` has no padding. All ranks
    # must send the same number of elements, so the shards are padded here.
    ranks = math.prod(mesh.size(dim) for dim in dims)
    for number, tensor in enumerate(tensors):
        missing = -(-tensor.shape[0] // ranks) - parts[number].shape[0]
        if missing:
            parts[number] = F.pad(parts[number], (0, 0) * (tensor.dim() - 1) + (0, missing))
    for dim in dims[:-1]:
        parts = [part.flatten(0, 1) for part in gather_flat(parts, mesh.get_group(dim))]
    for part, tensor in zip(gather_flat(parts, mesh.get_group(dims[-1])), tensors, strict=True):
        # This is a copy (unless the tensor is alone in the batch), so a receiver that keeps one
        # does not keep all.
        yield part.reshape(-1, *tensor.shape[1:])[: tensor.shape[0]]
