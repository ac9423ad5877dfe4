"""Linear layers in few bits, through torchao: 8-bit products (``--float8-training``) and a
quantized base (LoRA).

The base of an adapter in 8 or 4 bits is QLoRA (https://arxiv.org/abs/2305.14314). The weights of
the linear layers of the decoder layers are kept as codes and scales. Each forward and each backward
pass of a layer computes its weight from them, in the dtype of the pass, and keeps nothing of it. So
the model that is trained, and that engines get, is the one with the rounded weights.

Codes and scales are buffers and not parameters: FSDP2 shards parameters, but torchao 0.18 can
gather shards only of its 4-bit tensors, and only if ranks divide their blocks evenly. Hence there
is one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from slime.models.autograd import Context, Gradients
from slime.models.cpu_kernels import CpuLinear, linear
from slime.models.loading import ModelError
from slime.models.lora import LoraLinear

MULTIPLE = 16  # of the rows and columns of a product, which the kernels need


def use_float8(layers: Sequence[nn.Module], recipe: str, emulate: bool = False) -> int:
    """Replace the linear layers within decoder layers by those of torchao, with the same
    parameters.

    Inputs, weights and gradients of the outputs are cast when a product needs them; parameters,
    gradients and all other computations keep their dtypes. Layers whose sizes are not multiples of
    16 stay as they are.

    Args:
        layers: The decoder layers, before they are compiled or sharded. They are changed.
        recipe: ``tensorwise`` (one scale per tensor), ``rowwise`` (one per row), or
            ``rowwise_with_gw_hp`` (rowwise, with the gradients of weights in bfloat16).
        emulate: Round to 8-bit floats, but compute the products in float32. For tests without a
            GPU.

    Returns:
        The number of layers that were replaced.

    Raises:
        ModelError: The GPU has no 8-bit floats, or no layer has fitting sizes.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if not emulate and torch.cuda.get_device_capability() < (8, 9):
        raise ModelError(
            f"--float8-training: {torch.cuda.get_device_name()} has no 8-bit floats (compute "
            "capability 8.9 is needed)"
        )
    config = Float8LinearConfig.from_recipe_name(recipe)
    if emulate:
        # its dataclass is frozen, and a recipe takes no other settings
        object.__setattr__(config, "emulate", True)
    found = [name for layer in layers for name, module in layer.named_modules() if _fits(module)]
    for layer in layers:
        convert_to_float8_training(
            layer, module_filter_fn=lambda module, name: _fits(module), config=config
        )
    if not found:
        raise ModelError(
            f"--float8-training: no linear layer has sizes that are multiples of {MULTIPLE}"
        )
    return len(found)


def _fits(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or isinstance(module, LoraLinear):
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0


StateDict = Iterator[tuple[str, Tensor, bool]]
"""The names and values of tensors, and whether each is a parameter."""
PREFIX = "weight_"
"""The beginning of the names of the buffers that are one weight."""
_BLOCK = 64
_MOST_SCALES = 256
"""Weights that share a scale in 4 bits, and the largest number of scales that share a scale of
their own.
"""


class _Packed(Protocol):
    """What torchao's quantized tensors have: the plain tensors that they consist of."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]: ...


class QuantizedWeight(nn.Linear):
    """A linear layer whose weight is quantized. Its bias, if any, is not.

    Attributes:
        weight_parts: The names of the plain tensors that are the weight, without :data:`PREFIX`.
        weight_of: Returns the weight, ``[out, in]`` with this dtype, from these tensors.
    """

    weight_parts: tuple[str, ...]
    weight_of: Callable[[dict[str, Tensor], torch.dtype], Tensor]

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that the codes stand for, ``[out, in]``."""
        return self.weight_of(
            {name: getattr(self, PREFIX + name) for name in self.weight_parts}, dtype
        )

    def plain(self, x: Tensor) -> Tensor:
        """Return ``W x`` plus the bias, which keeps neither ``W`` nor ``x`` for the backward
        pass.
        """
        out = cast(Tensor, _Product.apply(x, self))
        return out if self.bias is None else out + self.bias


class QuantizedLinear(QuantizedWeight):
    """A layer without an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        return self.plain(input)


class QuantizedLoraLinear(QuantizedWeight, LoraLinear):
    """A layer with an adapter."""


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, layer: QuantizedWeight) -> Tensor:
        ctx.settings = (layer,)
        return linear(x, layer.rounded(x.dtype))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        (layer,) = ctx.settings
        return linear(grads[0], layer.rounded(grads[0].dtype).t()), None


@torch.no_grad()
def quantize_base(layers: Sequence[nn.Module], form: str, device: torch.device) -> int:
    """Quantize the weights of the linear layers within decoder layers, in place.

    Args:
        layers: The decoder layers. Adapters must have been added.
        form: ``int8`` (one scale per row) or ``nf4`` (4-bit NormalFloat: one scale per 64 weights,
            which are 8-bit numbers themselves).
        device: Where the codes are computed and stay. One weight at a time is there in float32.

    Returns:
        The number of layers that were quantized. In ``nf4``, those whose number of weights is no
        multiple of 64 stay as they are.

    Raises:
        ModelError: No layer has a fitting size.
    """
    count = 0
    for module in [module for layer in layers for module in layer.modules()]:
        if type(module) not in (nn.Linear, CpuLinear, LoraLinear):
            continue
        assert isinstance(module, nn.Linear)
        if form == "nf4" and module.weight.numel() % _BLOCK:
            continue
        packed = _PACK[form](module.weight.detach().to(device, torch.float32))
        _attach(module, packed, form)
        count += 1
    if not count:
        raise ModelError(
            f"--lora-base-quantization {form}: no linear layer has a multiple of {_BLOCK} weights"
        )
    return count


def quantized_layers(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Return the layers with quantized weights by name, in the order of the model."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedWeight)
    }


def rounded_weights(tensors: StateDict, model: nn.Module) -> StateDict:
    """Yield the tensors of a model's state dict, with the weights, in float32, in place of their
    parts.
    """
    layers = quantized_layers(model)
    for name, value, is_parameter in tensors:
        module, _, part = name.rpartition(".")
        layer = layers.get(module)
        if layer is None or not part.startswith(PREFIX):
            yield name, value, is_parameter
        elif part == PREFIX + layer.weight_parts[0]:
            yield f"{module}.weight", layer.rounded(torch.float32), True


def _attach(module: nn.Linear, packed: _Packed, form: str) -> None:
    names, context = packed.__tensor_flatten__()
    kind = type(packed)
    shape = module.weight.shape
    stride = module.weight.stride()

    def weight_of(parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        whole = kind.__tensor_unflatten__(parts, context, shape, stride)  # type: ignore[attr-defined]
        wide: Tensor = (
            whole.get_original_weight() if form == "nf4" else whole.dequantize(torch.float32)
        )
        # rounded once, so that passes in every dtype compute with what engines get
        return wide.to(dtype)

    del module.weight
    for name in names:
        module.register_buffer(
            PREFIX + name, getattr(packed, name).clone(memory_format=torch.contiguous_format)
        )
    module.__class__ = QuantizedLoraLinear if isinstance(module, LoraLinear) else QuantizedLinear
    assert isinstance(module, QuantizedWeight)
    module.weight_parts = tuple(names)
    module.weight_of = weight_of


def _int8(weight: Tensor) -> _Packed:
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    return cast(_Packed, Int8Tensor.from_hp(weight, PerRow()))


def _nf4(weight: Tensor) -> _Packed:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor

    blocks = weight.numel() // _BLOCK
    return cast(_Packed, NF4Tensor.from_tensor(weight, _BLOCK, min(_MOST_SCALES, blocks & -blocks)))


_PACK: dict[str, Callable[[Tensor], _Packed]] = {"int8": _int8, "nf4": _nf4}
