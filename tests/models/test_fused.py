"""Functions that are compiled to one kernel on a GPU: which sizes they are compiled for, norms with
a gate, and short convolutions."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from needs import needs_transformers
from torch import Tensor, nn
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from slime.models import fused
from slime.models.fused import (
    convolve,
    norm_and_gate,
    use_compiled_convolutions,
    use_compiled_norms,
)


def test_the_compiler_is_not_asked_before_a_tensor_on_a_gpu_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch imports its compiler in ``torch.compile``; a process that computes on the CPU need not
    wait for that.
    """

    def compile_it(_: object) -> None:
        raise AssertionError("torch.compile was called")

    monkeypatch.setattr(torch, "compile", compile_it)

    @fused.fused_on_cuda
    def double(x: Tensor) -> Tensor:
        return x * 2

    assert double(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_function_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fused.fuse(True)  # a backend of another test may have turned it off in this process
    asked = []
    plain = torch.compile

    def compile_it(fn: object) -> object:
        asked.append(fn)
        return plain(fn)

    monkeypatch.setattr(torch, "compile", compile_it)

    @fused.fused_on_cuda
    def double(x: Tensor) -> Tensor:
        return x * 2

    for rows in (2, 3):
        assert double(torch.ones(rows, 4, device="cuda")).sum() == 8 * rows
    assert len(asked) == 1


CLASSES = [Qwen3_5RMSNormGated, Qwen3_5MoeRMSNormGated, Qwen3NextRMSNormGated]


def values_and_gradients(norm: Callable[[Tensor, Tensor], Tensor], weight: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows, gate = (
        torch.randn(5, len(weight), generator=generator).to(weight).requires_grad_()
        for _ in range(2)
    )
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
    compiled = values_and_gradients(
        lambda rows, gate: norm_and_gate(rows, gate, weight=weight, eps=1e-6), weight
    )
    for got, expected in zip(compiled, want, strict=True):
        assert (got.float() - expected).norm() <= 2e-2 * expected.norm()


REFERENCE = "its own convolution is a function since then"


def results(
    function: Callable[..., Tensor],
    bias: bool,
    activation: str | None,
    device: str,
    dtype: torch.dtype,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 7, 12), (12, 4), (12,)]
    inputs = [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in shapes
    ]
    rows, weight, shift = inputs
    out = function(rows.transpose(1, 2), weight, shift if bias else None, activation=activation)
    assert out.dtype == dtype
    kept = inputs if bias else inputs[:2]
    weights = torch.cos(torch.arange(out.numel(), device=device)).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), kept)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_values_and_gradients_are_those_of_transformers(bias: bool, activation: str | None) -> None:
    needs_transformers("5.15", REFERENCE)
    given = bias, activation, "cpu", torch.float64
    for got, want in zip(
        results(convolve, *given), results(modeling_qwen3_5.causal_conv1d_fn, *given), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_it_is_compiled_and_equal() -> None:
    needs_transformers("5.15", REFERENCE)
    wide = results(modeling_qwen3_5.causal_conv1d_fn, True, "silu", "cuda", torch.float64)
    for got, want in zip(
        results(convolve, True, "silu", "cuda", torch.bfloat16), wide, strict=True
    ):
        assert (got.double() - want).norm() <= 2e-2 * want.norm()


@pytest.mark.parametrize("installed", [False, True])
def test_it_takes_the_place_of_the_slow_function(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = modeling_lfm2.causal_conv1d_fn
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", plain)  # and back at the end
    found = find_spec("json") if installed else None
    monkeypatch.setattr(fused, "find_spec", lambda name: found)
    mixer = modeling_lfm2.Lfm2ShortConv.__new__(modeling_lfm2.Lfm2ShortConv)
    assert use_compiled_convolutions([mixer, nn.Linear(1, 1)]) is not installed
    assert (modeling_lfm2.causal_conv1d_fn is plain) is installed
