"""Routed experts on a GPU: the weights of all experts of a layer in one grouped product.

transformers computes its experts with grouped products, too. But the gradients of its gathers are scattered additions:
those of the tokens, whose rows are added in bfloat16, and those of the biases of gpt-oss, where thousands of rows are
added to one bias one after the other. Here both directions of a permutation are gathers
(:mod:`slime.models.permutation`), and products and biases are those of :mod:`slime.models.grouped_product`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from slime.models.grouped_product import grouped_linear
from slime.models.permutation import Order, combine, spread

NAME = "slime_grouped"


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
    counts = ends.diff(prepend=ends.new_zeros(1))
    up = "gate_up_proj" if self.has_gate else "up_proj"
    activate: Callable[[Tensor], Tensor] = self._apply_gate if self.has_gate else self.act_fn
    inner = activate(_project(self, up, spread(hidden, order), counts))
    out = _project(self, "down_proj", inner, counts)
    factors = weights.reshape(-1).index_select(0, pairs).unsqueeze(1)
    return combine((out * factors).to(hidden.dtype), order)


def _project(self: nn.Module, name: str, x: Tensor, counts: Tensor) -> Tensor:
    """Multiply the sorted rows of ``x``, ``[N, in]``, by the weights of their experts, and add their biases."""
    weight = getattr(self, name)
    bias = getattr(self, f"{name}_bias") if self.has_bias else None
    return grouped_linear(x, weight.transpose(1, 2) if self.is_transposed else weight, counts, bias)
