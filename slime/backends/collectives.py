"""Collectives over many small values: sums of metrics over the ranks of a data-parallel job, and
whole tensors of both backends, also from FSDP's shards.

With one collective per parameter, launches cost more than the transfer: a model with 64 layers has
about 700 parameters, most of them small. So consecutive ones share one, up to ``BATCH_BYTES`` of
whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from slime.backends.loss import is_max_metric
from slime.models.segments import sum_over

T = TypeVar("T")
NamedTensor = tuple[str, Tensor]
BATCH_BYTES = 1 << 28  # gathering needs several times as much memory for a short time
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The older name is deprecated in torch 2.13."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The values of ``--train-dtype``."""


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor. A plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(part: Tensor, like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return a tensor that has ``part`` on this rank and is sharded as ``like``.

    Args:
        shape: The shape of the whole tensor; None for that of ``like``.
    """
    if not isinstance(like, DTensor):
        return part
    whole = like if shape is None else torch.empty(*shape, device="meta")
    mesh = like.device_mesh
    return DTensor.from_local(
        part, mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def gather_objects(value: T, group: ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of a group, in the order of ranks: of this process alone if
    there are no others.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if ranks == 1:
        return [value]
    values = [value] * ranks
    dist.all_gather_object(values, value, group=group)
    return values


@dataclass(frozen=True)
class DataParallelReduce:
    """The implementation of ``slime.algorithms.sequences.Reduce`` for process groups.

    Args:
        world_size: The number of ranks in ``group``.
        group: The ranks that have other samples; None for all ranks.
        sequence_group: The ranks that have other tokens of the same samples; None if there are
            none.
    """

    world_size: int
    device: torch.device
    group: ProcessGroup | None = None
    sequence_group: ProcessGroup | None = None

    def over_data(self, x: Tensor) -> Tensor:
        if self.world_size == 1:
            return x
        total = x.detach().to(self.device, copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(x.device)

    def over_sequence(self, x: Tensor) -> Tensor:
        return x if self.sequence_group is None else sum_over(x, self.sequence_group)

    def maximum(self, values: list[float]) -> list[float]:
        """Return the element-wise maximum over ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def total(self, values: list[float]) -> list[float]:
        """Return the element-wise sum over ranks, in float64."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world_size == 1:
            return values
        packed = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(packed, op=op, group=self.group)
        return packed.tolist()

    def each(self, value: float) -> list[float]:
        """Return the values of all ranks, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        # A gather, and not a sum of rows that are 0 except at one place, which could turn another
        # rank's inf into NaN.
        mine = torch.tensor([value], dtype=torch.float64, device=self.device)
        gathered = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(gathered, mine, group=self.group)
        return [float(x) for x in gathered]

    def metrics(self, shares: dict[str, float], same_names: bool) -> dict[str, float]:
        """Sum the parts of metrics over ranks; ``*_max`` are combined by maximum.

        Args:
            same_names: Whether all ranks have the same metrics. Otherwise (with a rank without
                samples, or with metrics of a user's function) the names are exchanged first.
        """
        if self.world_size == 1:
            return shares
        # Every metric must have the same place in the collective on all ranks, which may have added
        # them in different orders.
        names = sorted(shares)
        if not same_names:
            names = sorted(
                {name for theirs in gather_objects(names, self.group) for name in theirs}
            )
        sums = [name for name in names if not is_max_metric(name)]
        maxima = [name for name in names if is_max_metric(name)]
        summed = self.total([shares.get(name, 0.0) for name in sums]) if sums else []
        largest = (
            self.maximum([shares.get(name, float("-inf")) for name in maxima]) if maxima else []
        )
        return dict(zip(sums + maxima, summed + largest, strict=True))


def batched(
    items: Iterable[T], kind: Callable[[T], object], nbytes: Callable[[T], int]
) -> Iterator[list[T]]:
    """Divide items into runs of one kind that have up to ``BATCH_BYTES``; a larger item is alone.

    An item of kind None joins any run. It begins none, but is passed on at once.
    """
    batch: list[T] = []
    known: object = None
    size = 0
    for item in items:
        this = kind(item)
        if this is None and not batch:
            yield [item]
            continue
        count = nbytes(item)
        if batch and (this not in (None, known) or size + count > BATCH_BYTES):
            yield batch
            batch = []
            size = 0
        batch.append(item)
        known = known if this is None else this
        size += count
    if batch:
        yield batch


def gather_flat(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Gather the tensors of all ranks in one collective; returns ``[ranks, *shape]`` for each.

    The tensors must have the same shapes on all ranks, and all of them the same dtype. The results
    are views of the received buffer, so they need no further memory but keep it alive.
    """
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    everyones = flat.new_empty(group.size() * flat.numel())
    all_gather_flat(everyones, flat, group=group)
    counts = [tensor.numel() for tensor in tensors]
    parts = everyones.view(group.size(), -1).split(counts, dim=1)
    return [part.view(-1, *x.shape) for part, x in zip(parts, tensors, strict=True)]


def whole_tensors(named: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
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


def _kind(named: NamedTensor) -> object:
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
