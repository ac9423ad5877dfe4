"""oneDNN's products against torch's own in float64, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slime.models.cpu_kernels import (
    CpuLinear,
    linear,
    matmul_nt,
    onednn_available,
    use_onednn_linears,
)


@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 8), (2, 7, 8), (130, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_float64(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(5, 8, requires_grad=True)
    offset = torch.randn(5, requires_grad=True) if bias else None
    inputs = [t for t in (x, weight, offset) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    out = linear(x, weight, offset)
    expected = nn.functional.linear(*exact)
    seed = torch.randn(out.shape)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(out, inputs, seed)
    expected_grads = torch.autograd.grad(expected, exact, seed.double())
    for got, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_gradient_of_an_input_view_and_frozen_weight() -> None:
    weight = torch.randn(4, 6)
    base = torch.randn(6, 10, requires_grad=True)
    linear(base.t(), weight).sum().backward()
    torch.testing.assert_close(base.grad, weight.sum(0)[:, None].expand(6, 10))


def test_matmul_takes_views_and_other_dtypes() -> None:
    a, b = torch.randn(6, 9).t(), torch.randn(6, 5).t()
    torch.testing.assert_close(matmul_nt(a, b), a @ b.t(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(matmul_nt(a.double(), b.double()), a.double() @ b.double().t())


def test_only_plain_linears_are_turned_and_names_stay() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 3), Special(3, 3), nn.ReLU())
    names = list(model.state_dict())
    changed = use_onednn_linears(model)
    assert changed == (1 if onednn_available() else 0)
    assert type(model[1]) is Special
    assert isinstance(model[0], CpuLinear) == onednn_available()
    assert list(model.state_dict()) == names
