"""Sums over the ranks of a data-parallel job."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from slime.backends.loss import is_max_metric
from slime.models.context_parallel import sum_over


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class DataParallelReduce:
    """``slime.algorithms.reduce.Reduce`` where every data-parallel rank holds whole samples.

    Args:
        world_size: ranks of ``group``.
        group: ranks that hold other samples; None for all.
        sequence_group: ranks that hold other tokens of the same samples; None when there are none.
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
        """Element-wise over ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def total(self, values: list[float]) -> list[float]:
        """Element-wise sum over ranks, in float64."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world_size == 1:
            return values
        packed = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(packed, op=op, group=self.group)
        return packed.tolist()

    def each(self, value: float) -> list[float]:
        """The value of every rank, by rank."""
        if self.world_size == 1:
            return [value]
        # A gather, since a sum over a row that is 0 but for one place would turn a neighbour's inf into nan.
        mine = torch.tensor([value], dtype=torch.float64, device=self.device)
        gathered = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(gathered, mine, group=self.group)
        return [float(x) for x in gathered]

    def metrics(self, shares: dict[str, float], same_names: bool) -> dict[str, float]:
        """Shares summed over ranks, ``*_max`` by maximum.

        Args:
            same_names: all ranks have the same metrics; otherwise (a rank without samples) names are
                exchanged first.
        """
        if self.world_size == 1:
            return shares
        # All ranks must add the same metric in the same place of the collective, whatever the order in which they met
        # them.
        names = sorted(shares)
        if not same_names:
            everyones: list[list[str] | None] = [None] * self.world_size
            dist.all_gather_object(everyones, names, group=self.group)
            names = sorted({name for theirs in everyones for name in theirs or []})
        sums = [name for name in names if not is_max_metric(name)]
        maxima = [name for name in names if is_max_metric(name)]
        summed = self.total([shares.get(name, 0.0) for name in sums]) if sums else []
        largest = self.maximum([shares.get(name, float("-inf")) for name in maxima]) if maxima else []
        return dict(zip(sums + maxima, summed + largest, strict=True))
