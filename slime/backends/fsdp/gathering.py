"""Gather whole tensors from FSDP's shards, many at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from slime.backends.collectives import batched, gather_flat


def whole_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors in the given order. This is a collective operation if some tensors are
    ``DTensor``.

    Tensors that are not sharded are yielded unchanged, so they may be the caller's memory. Sharded
    tensors with the same dtype and the same mesh share an all-gather, even if there are others
    between them. All ranks must pass the same names in the same order.
    """
    for batch in batched(named, _kind, lambda one: math.prod(one[1].shape) * one[1].itemsize):
        sharded = [x for _, x in batch if isinstance(x, DTensor) and _shard_dim(x) is not None]
        whole = _all_gather(sharded)
        for name, tensor in batch:
            if not isinstance(tensor, DTensor):
                yield name, tensor
            else:
                yield name, next(whole) if _shard_dim(tensor) is not None else tensor.full_tensor()


def _kind(named: tuple[str, Tensor]) -> object:
    """Return what tensors of one all-gather have in common; None for one that takes part in
    none.
    """
    tensor = named[1]
    dim = _shard_dim(tensor)
    if not isinstance(tensor, DTensor) or dim is None:
        return None
    return tensor.device_mesh, dim, tensor.dtype


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
    padded = []
    for tensor in tensors:
        shard = tensor.to_local()
        missing = -(-tensor.shape[0] // ranks) - shard.shape[0]
        padded.append(F.pad(shard, (0, 0) * (shard.dim() - 1) + (0, missing)) if missing else shard)
    for parts, tensor in zip(gather_flat(padded, group), tensors, strict=True):
        # This is a copy (unless the tensor is alone in the batch), so a receiver that keeps one
        # does not keep all.
        yield parts.reshape(-1, *tensor.shape[1:])[: tensor.shape[0]]
