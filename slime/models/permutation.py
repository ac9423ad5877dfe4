"""The order in which tokens go to experts: one row for each pair of a token and an expert that it is routed to, sorted
by expert.

megatron-core without Transformer Engine finds this order with ``masked_select``, for which the host waits for the GPU,
and adds rows to their tokens with ``scatter_add_`` in the dtype of the activations, in an order that differs between
runs. Here both directions are gathers: no size is read back, the sum of a token's rows is made in float32, and its
order is that of the experts. The two directions are adjoint, so that each is the backward pass of the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slime.models.autograd import Context, Gradients
from slime.models.fused import fused_on_cuda


class Order(NamedTuple):
    """``N = T · k`` sorted rows, ``k`` of which belong to each of ``T`` tokens."""

    rows: Tensor
    """int64 ``[N]``: the token of each sorted row."""
    slots: Tensor
    """int64 ``[T, k]``: the sorted rows of each token, in ascending order."""


class Routed(NamedTuple):
    """Tokens with the order in which the experts of this rank process them."""

    hidden: Tensor
    """``[T, H]``."""
    order: Order


def order_by_expert(routing_map: Tensor, probs: Tensor, topk: int) -> tuple[Order, Tensor, Tensor]:
    """Sort the pairs of tokens and experts by expert, and by token within an expert.

    Args:
        routing_map: Bool ``[T, E]``, with exactly ``topk`` experts for each token.
        probs: ``[T, E]``, the weights of the experts, 0 for the others.

    Returns:
        The order, the weight ``[N]`` of each row, and the number of rows of each expert, int64 ``[E]``.

    The number of pairs before a place comes from one scan over the whole map, and the place of the n-th pair from a
    search in it. A scan along the tokens of a ``[T, E]`` map takes a hundred times as long on a GPU, and a list of the
    pairs would be of a size that the host has to wait for.
    """
    tokens, experts = routing_map.shape
    by_expert = routing_map.t().reshape(-1).cumsum(0)  # how many of the pairs are at or before this place
    wanted = torch.arange(1, tokens * topk + 1, device=routing_map.device)
    pairs = torch.searchsorted(by_expert, wanted)  # expert · T + token, ascending
    of_tokens = torch.searchsorted(routing_map.reshape(-1).cumsum(0), wanted)  # token · E + expert, ascending
    slots = by_expert.index_select(0, of_tokens % experts * tokens + of_tokens // experts) - 1
    weights = probs.t().reshape(-1).index_select(0, pairs)
    return Order(pairs % max(tokens, 1), slots.view(tokens, topk)), weights, routing_map.sum(0)


def order_of_chunks(sizes: Tensor, chunks: Tensor, rows: int) -> Order:
    """Return the order that moves consecutive chunks of rows, ``k = 1``.

    Args:
        sizes: int64 ``[C]``, the rows of each chunk, ``rows`` in total.
        chunks: int64 ``[C]``, the chunks in their new order.
    """
    moved = sizes[chunks]
    shift = (sizes.cumsum(0) - sizes)[chunks] - (moved.cumsum(0) - moved)
    places = torch.arange(rows, device=sizes.device)
    source = places + shift.repeat_interleave(moved, output_size=rows)
    return Order(source, torch.empty_like(source).scatter_(0, source, places).unsqueeze(1))


def spread(x: Tensor, order: Order) -> Tensor:
    """Return the token of each sorted row: ``[T, H]`` -> ``[N, H]``."""
    return _Spread.apply(x, *order)


def combine(x: Tensor, order: Order) -> Tensor:
    """Return the sum of each token's rows: ``[N, H]`` -> ``[T, H]``, summed in float32."""
    return _Combine.apply(x, *order)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        (slots,) = ctx.saved_tensors
        return _summed(grads[0].contiguous(), slots), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return _summed(x, slots)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        (rows,) = ctx.saved_tensors
        return grads[0].index_select(0, rows), None, None


@fused_on_cuda
def _summed(x: Tensor, slots: Tensor) -> Tensor:
    # Written out for each of the k rows: the compiler makes one kernel that reads them and writes their sum, where
    # a sum over a gathered [T, k, H] would be a reduction with much less work per thread.
    dtype = torch.promote_types(x.dtype, torch.float32)
    total = x[slots[:, 0]].to(dtype)
    for choice in range(1, slots.shape[1]):
        total = total + x[slots[:, choice]].to(dtype)
    return total.to(x.dtype)
