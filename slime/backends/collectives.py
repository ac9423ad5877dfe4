"""Collectives over many small values: sums of metrics over the ranks of a data-parallel job, and
whole tensors of both backends.

With one collective per parameter, launches cost more than the transfer: a model with 64 layers has
about 700 parameters, most of them small. So consecutive ones share one, up to ``BATCH_BYTES`` of
whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from slime.backends.loss import is_max_metric
from slime.models.segments import sum_over

T = TypeVar("T")
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
