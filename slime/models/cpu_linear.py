"""Float32 matrix products on the CPU with oneDNN.

``torch.nn.functional.linear`` computes float32 products with the BLAS library that torch was built with. If this is MKL
and the processor is not made by Intel, MKL only uses its AVX2 code. On an AMD EPYC with AVX-512, two cores and the
shapes of SmolLM2, this gives 175–190 GFLOP/s, and oneDNN, which selects its code by the features of the processor,
gives 380–430 GFLOP/s. Both compute float32 products, but sum in a different order.

The operator is the one that the CPU backend of torch.compile emits. It has no gradient, so the forward and backward of
a linear layer are implemented here. It is used if the input of a module is a float32 CPU tensor; otherwise
``torch.nn.functional.linear`` is used.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slime.models.autograd import Context, Gradients

MIN_ROWS = 4
"""With fewer rows, MKL's matrix-vector code is faster."""


@functools.cache
def onednn_available() -> bool:
    """Return whether this build of torch has the operator, and the processor has AVX-512, which makes it faster."""
    return (
        torch.backends.mkldnn.is_available()
        and "AVX512" in torch.backends.cpu.get_cpu_capability()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def matmul_nt(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b.T`` for ``a [M, K]`` and ``b [N, K]``, which may be strided views. It has no gradient."""
    fits = a.shape[0] >= MIN_ROWS and a.shape[1] > 0 and b.shape[0] > 0  # oneDNN does not support empty products
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
    """Return ``x @ weight.T + bias``, ``[..., out]``, with gradients, computed by the fastest method for these tensors:
    ``x`` ``[..., in]``, ``weight`` ``[out, in]`` and ``bias`` ``[out]``."""
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
    """An ``nn.Linear`` whose forward uses :func:`linear`. Its parameters and their names are the same."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_onednn_linears(model: nn.Module) -> int:
    """Change the plain ``nn.Linear`` modules of a model to :class:`CpuLinear`, and return their number."""
    if not onednn_available():
        return 0
    # Subclasses of nn.Linear are left alone, because they may have their own forward.
    plain = [module for module in model.modules() if type(module) is nn.Linear]
    for module in plain:
        module.__class__ = CpuLinear
    return len(plain)
