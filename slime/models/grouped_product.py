"""Products of the rows of a tensor, which are sorted by group, with the weights and biases of their groups: experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.models.autograd import Context, Gradients

_ALIGNED = 8
"""The grouped kernel needs rows of a multiple of 16 bytes: of 8 values of bfloat16."""
_COLUMNS = 16  # of the ones


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply each group of rows of ``x``, ``[N, in]``, by its own ``weight``, ``[n, out, in]``, and add its ``bias``,
    ``[n, out]``; returns ``[N, out]``. ``counts``, ``[n]``, are the numbers of rows in the groups."""
    if bias is not None:
        return grouped_linear(x, weight, counts) + spread_bias(bias, counts, x)
    if not len(x):  # no rows belong to these groups; the product gives them a gradient of 0
        return x @ weight[0].t()
    # The factors of an adapter may not be aligned.
    if _fits_kernel(x) and all(size % _ALIGNED == 0 for size in weight.shape[1:]):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=_ends(counts))
    parts = x.split(counts.tolist())
    return torch.cat([part @ w.t() for part, w in zip(parts, weight.unbind(0), strict=True)])


def spread_bias(bias: Tensor, counts: Tensor, rows: Tensor) -> Tensor:
    """Return the bias of each row's group, ``[N, out]``: ``counts``, ``[n]``, rows have the same of ``bias``.

    The gradient of a bias is a sum over all rows of its group. It is a grouped product with ones, because scattered
    additions of thousands of rows to one would wait for each other.
    """
    places = torch.arange(len(rows), device=rows.device)
    return _Spread.apply(bias, torch.searchsorted(counts.cumsum(0), places, right=True), counts)


def _fits_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, bias: Tensor, groups: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(groups, counts)
        return bias.index_select(0, groups)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        groups, counts = ctx.saved_tensors
        grad = grads[0].contiguous()
        if _fits_kernel(grad) and len(grad) and grad.shape[1] % _ALIGNED == 0:
            return _sum_groups(grad, counts), None, None
        return grad.new_zeros(len(counts), grad.shape[1]).index_add_(0, groups, grad), None, None


# An operator that the compiler leaves as it is. It would give the ones another layout, which the kernel refuses.
@torch.library.custom_op("slime::sum_groups", mutates_args=())
def _sum_groups(rows: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of each group of rows of ``rows``, ``[N, out]``, as ``[n, out]``."""
    ones = rows.new_ones(len(rows), _COLUMNS)
    return F.grouped_mm(ones.t(), rows, offs=_ends(counts))[:, 0].contiguous()


@_sum_groups.register_fake
def _(rows: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(len(counts), rows.shape[1])
