"""Sums and gathers with gradients over the ranks of context parallelism, which divide the tokens of samples."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from slime.models.autograd import Context, Gradients


class GatherRows(torch.autograd.Function):
    """The rows ``[rows, ...]`` of all ranks of a group, concatenated in order of rank: ``[ranks * rows, ...]``."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.settings = (group,)
        out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        (group,), grad = ctx.settings, grads[0].contiguous()
        # Every rank used every row, so the gradient of a row is the sum over ranks; each gets the part of its own rows.
        # That is a reduce-scatter, the mirror image of the gather.
        out = grad.new_empty(grad.shape[0] // group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad, group=group)
        return out, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.settings = (group,)
        out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
        dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        (group,), grad = ctx.settings, grads[0].contiguous()
        out = grad.new_empty(grad.shape[0] * group.size(), *grad.shape[1:])
        dist.all_gather_into_tensor(out, grad, group=group)
        return out, None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.settings = (group,)
        # all_reduce works in place, and autograd may still need x.
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.settings[0])
        return total, None


def gather_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate ``[T, ...]`` of all ranks to ``[ranks · T, ...]``. In backward, gradients are summed over ranks."""
    return GatherRows.apply(x, group)


def scatter_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's ``[T, ...]`` of the sum of ``[ranks · T, ...]`` over ranks: the inverse of :func:`gather_rows`
    where each row is 0 on all ranks but one. In backward, each rank gets the gradients of all rows."""
    return _ScatterSum.apply(x, group)


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of tensors of any shape over ranks. The loss is the sum over all ranks, so gradients are summed
    over ranks as well."""
    return _SumOver.apply(x, group)
