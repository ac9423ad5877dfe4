"""Routed experts: the order of tokens by expert, products with the weights of all experts of a
layer, and both as the experts of transformers on a GPU.

megatron-core without Transformer Engine finds this order with ``masked_select``, for which the host
waits for the GPU, and adds rows to their tokens with ``scatter_add_`` in the dtype of the
activations, in an order that differs between runs. transformers computes its experts with grouped
products, too. But the gradients of its gathers are scattered additions: those of the tokens, whose
rows are added in bfloat16, and those of the biases of gpt-oss, where thousands of rows are added to
one bias one after the other.

Here both directions of the permutation are gathers: no size is read back, the sum of a token's rows
is made in float32, and its order is that of the experts. The two directions are adjoint, so that
each is the backward pass of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

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
        The order, the weight ``[N]`` of each row, and the number of rows of each expert, int64
        ``[E]``.

    The number of pairs before a place comes from one scan over the whole map, and the place of the
    n-th pair from a search in it. A scan along the tokens of a ``[T, E]`` map takes a hundred times
    as long on a GPU, and a list of the pairs would be of a size that the host has to wait for.
    """
    tokens, experts = routing_map.shape
    # how many of the pairs are at or before this place
    by_expert = routing_map.t().reshape(-1).cumsum(0)
    wanted = torch.arange(1, tokens * topk + 1, device=routing_map.device)
    pairs = torch.searchsorted(by_expert, wanted)  # expert · T + token, ascending
    # token · E + expert, ascending
    of_tokens = torch.searchsorted(routing_map.reshape(-1).cumsum(0), wanted)
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
    return _Moved.apply(x, *order, True)


def combine(x: Tensor, order: Order) -> Tensor:
    """Return the sum of each token's rows: ``[N, H]`` -> ``[T, H]``, summed in float32."""
    return _Moved.apply(x, *order, False)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, rows: Tensor, slots: Tensor, spreads: bool) -> Tensor:
        ctx.save_for_backward(rows, slots)
        ctx.settings = (spreads,)
        return x.index_select(0, rows) if spreads else _summed(x, slots)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        rows, slots = ctx.saved_tensors
        (spread,) = ctx.settings
        grad = grads[0]
        moved = _summed(grad.contiguous(), slots) if spread else grad.index_select(0, rows)
        return moved, None, None, None


@fused_on_cuda
def _summed(x: Tensor, slots: Tensor) -> Tensor:
    # Written out for each of the k rows: the compiler makes one kernel that reads them and writes
    # their sum, where a sum over a gathered [T, k, H] would be a reduction with much less work per
    # thread.
    dtype = torch.promote_types(x.dtype, torch.float32)
    total = x[slots[:, 0]].to(dtype)
    for choice in range(1, slots.shape[1]):
        total = total + x[slots[:, choice]].to(dtype)
    return total.to(x.dtype)


_ALIGNED = 8
"""The grouped kernel needs rows of a multiple of 16 bytes: of 8 values of bfloat16."""
_COLUMNS = 16  # of the ones


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply each group of rows of ``x``, ``[N, in]``, by its own ``weight``, ``[n, out, in]``,
    and add its ``bias``, ``[n, out]``; returns ``[N, out]``. ``counts``, ``[n]``, are the numbers
    of rows in the groups."""
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
    """Return the bias of each row's group, ``[N, out]``: ``counts``, ``[n]``, rows have the same of
    ``bias``.

    The gradient of a bias is a sum over all rows of its group. It is a grouped product with ones,
    because scattered additions of thousands of rows to one would wait for each other.
    """
    places = torch.arange(len(rows), device=rows.device)
    return _SpreadBias.apply(bias, torch.searchsorted(counts.cumsum(0), places, right=True), counts)


def _fits_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


class _SpreadBias(torch.autograd.Function):
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


# An operator that the compiler leaves as it is. It would give the ones another layout, which the
# kernel refuses.
@torch.library.custom_op("slime::sum_groups", mutates_args=())
def _sum_groups(rows: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of each group of rows of ``rows``, ``[N, out]``, as ``[n, out]``."""
    ones = rows.new_ones(len(rows), _COLUMNS)
    return F.grouped_mm(ones.t(), rows, offs=_ends(counts))[:, 0].contiguous()


@_sum_groups.register_fake
def _(rows: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(len(counts), rows.shape[1])


NAME = "slime_grouped"


def use_grouped_experts(model: PreTrainedModel) -> bool:
    """Let the experts of a model in bfloat16 on a GPU compute as above, if transformers would use
    grouped products.

    Returns:
        Whether the model was changed.
    """
    if not model._can_set_experts_implementation():
        return False
    if getattr(model.config.get_text_config(), "_experts_implementation", None) != "grouped_mm":
        return False
    ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
    model.set_experts_implementation(NAME)
    return True


def expert_outputs(self: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """Return what the experts make of their rows, ``[N, H]``.

    Args:
        self: The module with the fused weights of ``n`` experts.
        rows: ``[N, H]``, in the order of the experts.
        counts: int64 ``[n]``, the number of rows of each expert.
    """
    up = "gate_up_proj" if self.has_gate else "up_proj"
    activate: Callable[[Tensor], Tensor] = self._apply_gate if self.has_gate else self.act_fn
    return _project(self, "down_proj", activate(_project(self, up, rows, counts)), counts)


def grouped_experts(
    self: Any,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    outputs: Callable[[Any, Tensor, Tensor], Tensor] = expert_outputs,
) -> Tensor:
    """Return the weighted sum of each token's experts, ``[T, H]``. transformers calls it as the
    forward of its module.

    Args:
        self: The module with the fused weights of all experts.
        hidden: ``[T, H]``.
        chosen: int64 ``[T, k]``, the experts of each token.
        weights: ``[T, k]``, the factors of their outputs.
        outputs: Computes the rows of all experts; see :func:`expert_outputs`.
    """
    experts, pairs = torch.sort(chosen.reshape(-1), stable=True)  # [N = T · k]
    slots = torch.empty_like(pairs).scatter_(
        0, pairs, torch.arange(len(pairs), device=pairs.device)
    )
    order = Order(pairs // chosen.shape[1], slots.view(chosen.shape))
    # The number of rows up to each expert's last one. To search the sorted rows waits for nothing
    # on the GPU.
    ends = torch.searchsorted(
        experts, torch.arange(self.num_experts, device=experts.device), right=True
    )
    counts = ends.diff(prepend=ends.new_zeros(1))
    out = outputs(self, spread(hidden, order), counts)
    factors = weights.reshape(-1).index_select(0, pairs).unsqueeze(1)
    return combine((out * factors).to(hidden.dtype), order)


def _project(self: Any, name: str, x: Tensor, counts: Tensor) -> Tensor:
    """Multiply the sorted rows of ``x``, ``[N, in]``, by the weights of their experts, and add
    their biases.
    """
    weight = getattr(self, name)
    bias = getattr(self, f"{name}_bias") if self.has_bias else None
    return grouped_linear(x, weight.transpose(1, 2) if self.is_transposed else weight, counts, bias)
