"""RMSNorm with a gate, of the gated delta nets of Qwen3-Next and Qwen3.5, in one kernel on a GPU.

transformers computes it in some ten passes from release 5.15 on, by estimate a tenth of a log-prob pass of Qwen3.5-4B's
shape on an H200 (benchmarks/README.md); older releases take a kernel of flash-linear-attention.
"""

from __future__ import annotations

import types
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slime.models.fused import fused_on_cuda

_CLASSES = ("Qwen3NextRMSNormGated", "Qwen3_5RMSNormGated", "Qwen3_5MoeRMSNormGated")


def use_compiled_norms(modules: Iterable[nn.Module]) -> int:
    """Let the norms with a gate among these modules compute :func:`norm_and_gate`, and return their number."""
    found = [module for module in modules if type(module).__name__ in _CLASSES]
    for module in found:
        module.forward = types.MethodType(_forward, module)
    return len(found)


class _GatedNorm(nn.Module):
    """What the classes have in common."""

    weight: nn.Parameter
    variance_epsilon: float


def _forward(self: _GatedNorm, hidden_states: Tensor, gate: Tensor) -> Tensor:
    return norm_and_gate(hidden_states, gate, weight=self.weight, eps=self.variance_epsilon)


@fused_on_cuda
def norm_and_gate(rows: Tensor, gate: Tensor, *, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight * rows / rms(rows) * silu(gate)``, with the roundings of transformers.

    Args:
        rows, gate: ``[n, D]``.
        weight: ``[D]``.

    Returns:
        ``[n, D]`` in the dtype of ``rows``.
    """
    wide = rows.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed.to(rows.dtype) * F.silu(gate.to(torch.float32))).to(rows.dtype)
