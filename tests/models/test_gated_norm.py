from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from slime.models.gated_norm import norm_and_gate, use_compiled_norms

CLASSES = [Qwen3_5RMSNormGated, Qwen3_5MoeRMSNormGated, Qwen3NextRMSNormGated]


def values_and_gradients(norm: Callable[[Tensor, Tensor], Tensor], weight: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows, gate = (torch.randn(5, len(weight), generator=generator).to(weight).requires_grad_() for _ in range(2))
    out = norm(rows, gate)
    weights = torch.cos(torch.arange(out.numel(), device=out.device)).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), [rows, gate, weight])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_it_is_the_norm_of_transformers(kind: type[nn.Module], dtype: torch.dtype) -> None:
    norm = kind(16, eps=1e-5).to(dtype)
    nn.init.normal_(norm.weight)
    want = values_and_gradients(norm, norm.weight)
    assert use_compiled_norms(nn.Sequential(norm, nn.LayerNorm(16)).modules()) == 1
    for got, expected in zip(values_and_gradients(norm, norm.weight), want, strict=True):
        assert got.dtype == dtype and torch.equal(got, expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_it_is_compiled_and_close() -> None:
    norm = Qwen3_5RMSNormGated(128).cuda()
    nn.init.normal_(norm.weight)
    want = values_and_gradients(norm, norm.weight)
    weight = norm.weight.detach().to(torch.bfloat16).requires_grad_()
    compiled = values_and_gradients(lambda rows, gate: norm_and_gate(rows, gate, weight=weight, eps=1e-6), weight)
    for got, expected in zip(compiled, want, strict=True):
        assert (got.float() - expected).norm() <= 2e-2 * expected.norm()
