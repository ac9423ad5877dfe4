from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from needs import needs_transformers
from torch import Tensor, nn
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5

from slime.models import short_convolution
from slime.models.short_convolution import convolve, use_compiled_convolutions

REFERENCE = "its own convolution is a function since then"


def results(
    function: Callable[..., Tensor], bias: bool, activation: str | None, device: str, dtype: torch.dtype
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 7, 12), (12, 4), (12,)]
    inputs = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
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
    for got, want in zip(results(convolve, *given), results(modeling_qwen3_5.causal_conv1d_fn, *given), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_it_is_compiled_and_equal() -> None:
    needs_transformers("5.15", REFERENCE)
    wide = results(modeling_qwen3_5.causal_conv1d_fn, True, "silu", "cuda", torch.float64)
    for got, want in zip(results(convolve, True, "silu", "cuda", torch.bfloat16), wide, strict=True):
        assert (got.double() - want).norm() <= 2e-2 * want.norm()


@pytest.mark.parametrize("installed", [False, True])
def test_it_takes_the_place_of_the_slow_function(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = modeling_lfm2.causal_conv1d_fn
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", plain)  # and back at the end
    found = find_spec("json") if installed else None
    monkeypatch.setattr(short_convolution, "find_spec", lambda name: found)
    mixer = modeling_lfm2.Lfm2ShortConv.__new__(modeling_lfm2.Lfm2ShortConv)
    assert use_compiled_convolutions([mixer, nn.Linear(1, 1)]) is not installed
    assert (modeling_lfm2.causal_conv1d_fn is plain) is installed
