"""Functions of a few elementwise passes that are compiled to one kernel on a GPU, and the two that
models get.

transformers computes the RMSNorm with a gate of the gated delta nets of Qwen3-Next and Qwen3.5 in
some ten passes from release 5.15 on, by estimate a tenth of a log-prob pass of Qwen3.5-4B's shape
on an H200 (benchmarks/history.md); older releases take a kernel of flash-linear-attention.

PyTorch's own kernels for causal depthwise convolutions of a few taps (gated delta nets, Mamba-2,
LFM2) take a seventh of a step of Qwen3.5-4B's shape on an H200, with the copies into their layout
and back. Here, without causal-conv1d, the convolution is a sum of shifted rows, which the compiler
makes one kernel.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
# per compiled function, one for each combination of trailing sizes; torch's default limit is 8
COMPILED_VARIANTS = 64

_fused = True


def fuse(on: bool) -> None:
    """Set whether this process compiles functions with :func:`fused_on_cuda` (not with
    ``--no-compile-layers``).
    """
    global _fused
    _fused = on


def fused_on_cuda(fn: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Compile ``fn`` for tensors on a GPU. The first size of each tensor is dynamic. The function
    is compiled again for other trailing sizes, because kernels in which all sizes are dynamic are
    several times slower."""

    @functools.cache
    def compiled() -> Callable[_Arguments, _Result]:
        # At the first call, not where ``fn`` is defined: torch imports the compiler here, which
        # takes seconds.
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILED_VARIANTS)
        return torch.compile(fn)

    @functools.wraps(fn)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        tensors = [x for x in args if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)]
        # A compiled layer that contains the function sets the dynamic sizes itself.
        if not (_fused and tensors[0].is_cuda) or torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        for x in tensors:
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch._dynamo.mark_static(x, list(range(1, x.dim())))
        return compiled()(*args, **kwargs)

    return call


_CLASSES = ("Qwen3NextRMSNormGated", "Qwen3_5RMSNormGated", "Qwen3_5MoeRMSNormGated")


def use_compiled_norms(modules: Iterable[nn.Module]) -> int:
    """Let the norms with a gate among these modules compute :func:`norm_and_gate`, and return their
    number.
    """
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


_NAME = "causal_conv1d_fn"


def use_compiled_convolutions(mixers: Iterable[nn.Module]) -> bool:
    """Let the modeling code of these modules call :func:`convolve`, unless causal-conv1d is
    installed.

    Returns:
        Whether any code was changed.
    """
    code = [sys.modules[type(mixer).__module__] for mixer in mixers]
    found = (
        [module for module in code if hasattr(module, _NAME)]
        if find_spec("causal_conv1d") is None
        else []
    )
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
    return (
        _shifted_sum(rows.flatten(0, 1), positions, weight, bias, activation)
        .view(rows.shape)
        .transpose(1, 2)
    )


@fused_on_cuda
def _shifted_sum(
    rows: Tensor, positions: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    count = len(rows)
    taps = weight.shape[1]
    dtype = torch.promote_types(weight.dtype, torch.float32)
    before = F.pad(rows, (0, 0, taps - 1, 0))
    total = torch.zeros_like(rows, dtype=dtype) if bias is None else bias.to(dtype).expand_as(rows)
    for tap in range(taps):
        values = before[tap : tap + count].to(dtype)
        shift = taps - 1 - tap
        if shift:  # rows before the first of a sequence are those of another one
            values = torch.where((positions >= shift).unsqueeze(1), values, 0.0)
        total = total + values * weight[:, tap].to(dtype)
    return (total if activation is None else ACT2FN[activation](total)).to(rows.dtype)
