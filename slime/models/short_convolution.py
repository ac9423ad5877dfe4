"""Causal depthwise convolutions of a few taps, on a GPU without causal-conv1d: in gated delta nets, Mamba-2 and LFM2.

PyTorch's own kernels take a seventh of a step of Qwen3.5-4B's shape on an H200, with the copies into their layout and
back (benchmarks/README.md). Here the convolution is a sum of shifted rows, which the compiler makes one kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from slime.models.fused import fused_on_cuda

_NAME = "causal_conv1d_fn"


def use_compiled_convolutions(mixers: Iterable[nn.Module]) -> bool:
    """Let the modeling code of these modules call :func:`convolve`, unless causal-conv1d is installed.

    Returns:
        Whether any code was changed.
    """
    code = [sys.modules[type(mixer).__module__] for mixer in mixers]
    found = [module for module in code if hasattr(module, _NAME)] if find_spec("causal_conv1d") is None else []
    for module in found:
        setattr(module, _NAME, convolve)
    return bool(found)


def convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    """Compute what the function of this name does in transformers, for whole sequences.

    Args:
        hidden_states: ``[n, C, L]``, a transposed view of ``[n, L, C]``.
        weight: ``[C, taps]``; the last tap belongs to the token itself.

    Returns:
        ``[n, C, L]``, a transposed view again.
    """
    rows = hidden_states.transpose(1, 2)
    positions = torch.arange(rows.shape[1], device=rows.device).repeat(rows.shape[0])
    return _shifted_sum(rows.flatten(0, 1), positions, weight, bias, activation).view(rows.shape).transpose(1, 2)


@fused_on_cuda
def _shifted_sum(
    rows: Tensor, positions: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    count, taps = len(rows), weight.shape[1]
    dtype = torch.promote_types(weight.dtype, torch.float32)
    before = F.pad(rows, (0, 0, taps - 1, 0))
    total = torch.zeros_like(rows, dtype=dtype) if bias is None else bias.to(dtype).expand_as(rows)
    for tap in range(taps):
        values, shift = before[tap : tap + count].to(dtype), taps - 1 - tap
        if shift:  # rows before the first of a sequence are those of another one
            values = torch.where((positions >= shift).unsqueeze(1), values, 0.0)
        total = total + values * weight[:, tap].to(dtype)
    return (total if activation is None else ACT2FN[activation](total)).to(rows.dtype)
