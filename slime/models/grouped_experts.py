"""Routed experts on a GPU: the weights of all experts of a layer in one grouped product.

transformers computes its experts with grouped products, too. But the gradients of its gathers are scattered additions:
those of the tokens, whose rows are added in bfloat16, and those of the biases of gpt-oss, where thousands of rows are
added to one bias one after the other. Here both directions of a permutation are gathers
(:mod:`slime.models.permutation`), and the gradient of the biases is a grouped product with ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from slime.models.autograd import Context, Gradients
from slime.models.permutation import Order, combine, spread

NAME = "slime_grouped"
_COLUMNS = 16
"""The columns of ones. The kernel needs rows of a multiple of 16 bytes."""


def use_grouped_experts(model: PreTrainedModel) -> bool:
    """Let the experts of a model in bfloat16 on a GPU compute as above, if transformers would use grouped products.

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


def grouped_experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, ``[T, H]``. transformers calls it as the forward of its module.

    Args:
        self: The module with the fused weights of all experts.
        hidden: ``[T, H]``.
        chosen: int64 ``[T, k]``, the experts of each token.
        weights: ``[T, k]``, the factors of their outputs.
    """
    experts, pairs = torch.sort(chosen.reshape(-1), stable=True)  # [N = T · k]
    slots = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(len(pairs), device=pairs.device))
    order = Order(pairs // chosen.shape[1], slots.view(chosen.shape))
    # The number of rows up to each expert's last one. To search the sorted rows waits for nothing on the GPU.
    ends = torch.searchsorted(experts, torch.arange(self.num_experts, device=experts.device), right=True)
    up = "gate_up_proj" if self.has_gate else "up_proj"
    activate: Callable[[Tensor], Tensor] = self._apply_gate if self.has_gate else self.act_fn
    inner = activate(_project(self, up, spread(hidden, order), experts, ends))
    out = _project(self, "down_proj", inner, experts, ends)
    factors = weights.reshape(-1).index_select(0, pairs).unsqueeze(1)
    return combine((out * factors).to(hidden.dtype), order)


def _project(self: nn.Module, name: str, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
    """Multiply the sorted rows of ``x``, ``[N, in]``, by the weights of their experts, and add their biases."""
    weight = getattr(self, name)
    out = _grouped(x, weight if self.is_transposed else weight.transpose(1, 2), ends)
    return _AddBias.apply(out, getattr(self, f"{name}_bias"), experts, ends) if self.has_bias else out


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows of ``x``, ``[N, in]``, by its own ``weight``, ``[E, in, out]``."""
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        return F.grouped_mm(x, weight, offs=ends.to(torch.int32))
    parts = x.tensor_split(ends[:-1].cpu())
    return torch.cat([part @ w for part, w in zip(parts, weight.unbind(0), strict=True)])


class _AddBias(torch.autograd.Function):
    """``x + bias[experts]``, where ``x`` is ``[N, out]``, ``bias`` is ``[E, out]``, and ``experts`` ascend."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, bias: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(experts, ends)
        ctx.settings = (len(bias),)
        return x + bias.index_select(0, experts)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        experts, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        if grad.is_cuda and grad.dtype == torch.bfloat16:
            return grad, _sum_groups(grad, ends), None, None
        total = grad.new_zeros(ctx.settings[0], grad.shape[1]).index_add_(0, experts, grad)
        return grad, total, None, None


# An operator that the compiler leaves as it is. It would give the ones another layout, which the kernel refuses.
@torch.library.custom_op("slime::sum_groups", mutates_args=())
def _sum_groups(rows: Tensor, ends: Tensor) -> Tensor:
    """Return the sum of each group of rows of ``rows``, ``[N, out]``, as ``[E, out]``."""
    ones = rows.new_ones(len(rows), _COLUMNS)
    return F.grouped_mm(ones.t(), rows, offs=ends.to(torch.int32))[:, 0].contiguous()


@_sum_groups.register_fake
def _(rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(ends), rows.shape[1])
