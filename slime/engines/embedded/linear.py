"""Faster linear layers on the CPU: oneDNN with weights in its own blocked layout, siblings in one product.

torch's fp32 matrix product goes to MKL, which takes a slow path on CPUs of other makers (measured on an
AMD EPYC, 64 rows: 130 against 310 GFLOP/s). The packed copy costs the weights' memory once more; the
parameter stays the truth, and :meth:`PackedLinears.refresh` follows it after an update.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from slime.models.cpu_linear import CpuLinear

_PACK_ROWS = 64  # the row count that the layout is chosen for; any count works
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one parent that take the same input, one after the other."""


class PackedLinears:
    """All ``nn.Linear`` modules of a model, run by oneDNN.

    Args:
        fuse: compute siblings (query, key and value, say) as one product. Each gets a view of the result,
            which a model that insists on contiguous activations cannot take.
    """

    def __init__(self, model: nn.Module, fuse: bool = True) -> None:
        linears = {name: module for name, module in model.named_modules() if type(module) in (nn.Linear, CpuLinear)}
        self.groups = _siblings(linears) if fuse else []
        grouped = {id(module) for group in self.groups for module in group}
        self.groups += [[module] for module in linears.values() if id(module) not in grouped]
        self.stale = True

    @staticmethod
    def available(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether this torch has the operators for ``dtype`` here."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if dtype == torch.float32:
            return hasattr(torch.ops.mkldnn, "_linear_pointwise")
        return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def refresh(self) -> None:
        """Pack the weights anew if they changed."""
        if not self.stale:
            return
        for group in self.groups:
            for module in group:
                module.__dict__.pop("forward", None)  # free the old copy before the new one is made
            for module, forward in zip(group, _packed_forwards(group), strict=True):
                module.forward = forward  # type: ignore[assignment, method-assign]
        self.stale = False

    def drop(self) -> None:
        """Free the packed copies (until the next :meth:`refresh`)."""
        for group in self.groups:
            for module in group:
                module.__dict__.pop("forward", None)
        self.stale = True


def _siblings(linears: dict[str, nn.Linear]) -> list[list[nn.Linear]]:
    """Groups of :data:`_SIBLINGS` that can be one product: same input width, all with bias or all without."""
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


def _packed_forwards(group: list[nn.Linear]) -> list[Forward]:
    """One forward per layer of a group; the first that sees an input computes for all."""
    weight = torch.cat([module.weight.detach() for module in group]) if len(group) > 1 else group[0].weight.detach()
    biases = [module.bias.detach() for module in group if module.bias is not None]
    bias = torch.cat(biases) if len(biases) > 1 else biases[0] if biases else None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    linear = torch.ops.mkldnn._linear_pointwise

    def alone(x: torch.Tensor) -> torch.Tensor:
        return linear(x, packed, bias, "none", [], "")

    if len(group) == 1:
        return [alone]
    shared: list[torch.Tensor] = []  # the input last seen, and the products of all layers with it

    def part(start: int, end: int, last: bool) -> Forward:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if not shared or shared[0] is not x:
                shared[:] = [x, alone(x)]
            result = shared[1][..., start:end]
            if last:
                shared.clear()
            return result

        return forward

    forwards, start = [], 0
    for module in group:
        end = start + module.out_features
        forwards.append(part(start, end, module is group[-1]))
        start = end
    return forwards
