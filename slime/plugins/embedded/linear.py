"""Faster linear layers on the CPU: oneDNN with weights in its blocked layout, and sibling layers in one product.

torch uses MKL for fp32 matrix products, and MKL is slow on CPUs that are not made by Intel (measured on an AMD EPYC
with 64 rows: 130 against 310 GFLOP/s). The packed copies need as much memory as the weights. The parameters remain the
source of truth; :meth:`PackedLinears.refresh` packs them again after an update.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from slime.models.cpu_kernels import CpuLinear
from slime.models.lora import LoraLinear

_PACK_ROWS = 64  # the row count for which the layout is optimized; any count works
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that are called one after the other with the same input."""


class PackedLinears:
    """Replaces the forward of all ``nn.Linear`` modules of a model by oneDNN.

    Args:
        fuse: Compute sibling layers (for example query, key and value) as one product. The result of each layer is
            then a view, so this does not work for models that need contiguous activations.
    """

    def __init__(self, model: nn.Module, fuse: bool = True) -> None:
        linears = {name: module for name, module in model.named_modules() if type(module) in (nn.Linear, CpuLinear)}
        self.groups = _siblings(linears) if fuse else []
        grouped = {id(module) for group in self.groups for module in group}
        self.groups += [[module] for module in linears.values() if id(module) not in grouped]
        self.stale = True

    @staticmethod
    def available(device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether this build of torch has the operators for ``dtype`` on this device."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if dtype == torch.float32:
            return hasattr(torch.ops.mkldnn, "_linear_pointwise")
        return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def refresh(self) -> None:
        """Pack the weights again if they have changed."""
        if not self.stale:
            return
        for group in self.groups:
            for module in group:
                module.__dict__.pop("forward", None)  # frees the old copy before the new one is allocated
            for module, forward in zip(group, _packed_forwards(group), strict=True):
                module.forward = _with_adapter(module, forward)  # type: ignore[assignment, method-assign]
        self.stale = False

    def drop(self) -> None:
        """Free the packed copies. The plain forward is used until the next :meth:`refresh`."""
        for group in self.groups:
            for module in group:
                module.__dict__.pop("forward", None)
        self.stale = True


def _siblings(linears: dict[str, nn.Linear]) -> list[list[nn.Linear]]:
    """Return the groups of :data:`_SIBLINGS` that can be computed as one product.

    The layers of a group must have the same input size, and either all of them or none must have a bias.
    """
    groups = []
    for name in linears:
        parent, _, own = name.rpartition(".")
        for names in _SIBLINGS:
            group = [linears.get(f"{parent}.{sibling}") for sibling in names]
            found = [module for module in group if module is not None]
            if own != names[0] or len(found) != len(names):
                continue
            if len({(module.in_features, module.bias is None) for module in found}) == 1:
                groups.append(found)
    return groups


Forward = Callable[[torch.Tensor], torch.Tensor]


def _with_adapter(module: nn.Linear, base: Forward) -> Forward:
    """Return the forward of a layer from that of its own weights."""
    if not isinstance(module, LoraLinear):
        return base
    return lambda x: base(x) + module.adapter(x)


def _packed_forwards(group: list[nn.Linear]) -> list[Forward]:
    """Return one forward per layer of a group. The first layer called with an input computes the result of all."""
    weight = torch.cat([module.weight.detach() for module in group]) if len(group) > 1 else group[0].weight.detach()
    biases = [module.bias.detach() for module in group if module.bias is not None]
    bias = torch.cat(biases) if len(biases) > 1 else biases[0] if biases else None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    linear = torch.ops.mkldnn._linear_pointwise

    def alone(x: torch.Tensor) -> torch.Tensor:
        return linear(x, packed, bias, "none", [], "")

    if len(group) == 1:
        return [alone]
    shared: list[torch.Tensor] = []  # the last input, and the results of all layers for it

    def part(start: int, end: int, last: bool) -> Forward:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if not shared or shared[0] is not x:
                shared[:] = [x, alone(x)]
            result = shared[1][..., start:end]
            if last:  # the module calls the layers in order, so nobody needs the result after the last one
                shared.clear()
            return result

        return forward

    forwards, start = [], 0
    for module in group:
        end = start + module.out_features
        forwards.append(part(start, end, module is group[-1]))
        start = end
    return forwards
