"""Linear layers whose matrix products are computed with 8-bit floats (``--float8-training``), through torchao."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from slime.models.loading import ModelError
from slime.models.lora import LoraLinear

MULTIPLE = 16  # of the rows and columns of a product, which the kernels need


def use_float8(layers: Sequence[nn.Module], recipe: str, emulate: bool = False) -> int:
    """Replace the linear layers within decoder layers by those of torchao, with the same parameters.

    Inputs, weights and gradients of the outputs are cast when a product needs them; parameters, gradients and all other
    computations keep their dtypes. Layers whose sizes are not multiples of 16 stay as they are.

    Args:
        layers: The decoder layers, before they are compiled or sharded. They are changed.
        recipe: ``tensorwise`` (one scale per tensor), ``rowwise`` (one per row), or ``rowwise_with_gw_hp`` (rowwise,
            with the gradients of weights in bfloat16).
        emulate: Round to 8-bit floats, but compute the products in float32. For tests without a GPU.

    Returns:
        The number of layers that were replaced.

    Raises:
        ModelError: The GPU has no 8-bit floats, or no layer has fitting sizes.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if not emulate and torch.cuda.get_device_capability() < (8, 9):
        raise ModelError(
            f"--float8-training: {torch.cuda.get_device_name()} has no 8-bit floats (compute capability 8.9 is needed)"
        )
    config = Float8LinearConfig.from_recipe_name(recipe)
    if emulate:
        object.__setattr__(config, "emulate", True)  # its dataclass is frozen, and a recipe takes no other settings
    found = [name for layer in layers for name, module in layer.named_modules() if _fits(module)]
    for layer in layers:
        convert_to_float8_training(layer, module_filter_fn=lambda module, name: _fits(module), config=config)
    if not found:
        raise ModelError(f"--float8-training: no linear layer has sizes that are multiples of {MULTIPLE}")
    return len(found)


def _fits(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or isinstance(module, LoraLinear):
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
