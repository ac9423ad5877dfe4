"""Float32 matrix products on the CPU through oneDNN.

``torch.nn.functional.linear`` hands float32 products to the BLAS it was built with. Where that is MKL
and the processor is not Intel's, MKL stays on its AVX2 code: measured on an AMD EPYC with AVX-512, two
cores, SmolLM2's shapes, 175–190 GFLOP/s, against 380–430 for oneDNN, which picks its code by what the
processor can do. Results are float32 products in both cases, summed in another order.

The operator is the one that torch.compile's CPU backend emits. It has no gradient of its own, so the
three products of a linear layer are put together here. It is used when a module's input is a float32
CPU tensor, and ``torch.nn.functional.linear`` otherwise.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slime.models.autograd import Context, Gradients

MIN_ROWS = 4
"""Below this MKL's matrix-vector code is faster."""


@functools.cache
def onednn_available() -> bool:
    """Whether this build of torch has the operator, and the processor has what makes it worthwhile."""
    return (
        torch.backends.mkldnn.is_available()
        and "AVX512" in torch.backends.cpu.get_cpu_capability()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def matmul_nt(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` for ``a [M, K]`` and ``b [N, K]``, strided views welcome, without autograd."""
    fits = a.shape[0] >= MIN_ROWS and a.shape[1] > 0 and b.shape[0] > 0  # oneDNN knows no empty products
    if fits and a.device.type == "cpu" and a.dtype == b.dtype == torch.float32 and onednn_available():
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return a @ b.t()


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        flat = grad.reshape(-1, grad.shape[-1])
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            matmul_nt(flat, weight.t()).view_as(x) if need_x else None,
            matmul_nt(flat.t(), x.reshape(-1, x.shape[-1]).t()) if need_weight else None,
            flat.sum(0) if need_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` with gradients, the fastest way for the tensors at hand."""
    if (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and weight.dtype == torch.float32
        and x.numel() >= MIN_ROWS * x.shape[-1]
        and onednn_available()
    ):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return _OneDnnLinear.apply(x, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class CpuLinear(nn.Linear):
    """An ``nn.Linear`` whose forward goes through :func:`linear`; parameters and names are the same."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_onednn_linears(model: nn.Module) -> int:
    """Turn the plain ``nn.Linear`` modules of a model into :class:`CpuLinear`; returns how many."""
    if not onednn_available():
        return 0
    plain = [module for module in model.modules() if type(module) is nn.Linear]
    for module in plain:
        module.__class__ = CpuLinear
    return len(plain)
