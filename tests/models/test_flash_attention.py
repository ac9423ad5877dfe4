"""FlashAttention 4's operators: their shapes for ``torch.compile``, and on CUDA their numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from slime.models import flash_attention
from slime.models.flash_attention import use_if_possible
from slime.models.masked_attention import ScoreChanges
from slime.models.packed_attention import attend, padded_attention
from slime.models.segments import PackSegments
from tests.models.test_packed_attention import layout_of

BF16 = torch.bfloat16


def needs_the_package(test: Callable[..., None]) -> Callable[..., None]:
    missing = not flash_attention.is_installed()
    marked: Callable[..., None] = pytest.mark.cuda(
        pytest.mark.skipif(missing, reason="needs the package flash-attn-4")(test)
    )
    return marked


def pack_with_shared_prompts() -> PackSegments:
    layout = layout_of([(300, [900, 40, 1]), (17, [513]), (1000, [64, 700])], share=True)
    return PackSegments.from_layout(layout, "cuda")


@pytest.fixture(autouse=True)
def the_kernel_is_chosen() -> None:
    if torch.cuda.is_available():
        use_if_possible(True, torch.device("cuda", 0))


def test_the_cpu_has_a_kernel_of_its_own() -> None:
    assert "CPU" in use_if_possible(True, torch.device("cpu"))


def test_compiled_code_sees_the_shapes_of_both_passes() -> None:
    with FakeTensorMode():
        q = torch.empty(10, 4, 64, device="cuda", dtype=BF16)
        k, v = (torch.empty(12, 2, 64, device="cuda", dtype=BF16) for _ in range(2))
        sinks = torch.empty(4, device="cuda", dtype=BF16)
        starts = torch.empty(3, device="cuda", dtype=torch.int32)
        sizes = starts, starts, 6, 7, 0.1, -1
        out, lse = torch.ops.slime.flash_attention_4(q, k, v, *sizes, sinks, True)
        rows = out, q, k, v, out, lse
        with_sinks = torch.ops.slime.flash_attention_4_backward(*rows, *sizes, sinks, True)
        without = torch.ops.slime.flash_attention_4_backward(*rows, *sizes, None, True)
    assert out.shape == q.shape
    assert lse.shape == (4, 10)
    assert [x.shape for x in with_sinks] == [x.shape for x in (q, k, v, sinks)]
    assert [x.shape for x in without] == [x.shape for x in (q, k, v)]


@needs_the_package
@pytest.mark.parametrize("size", flash_attention.SIZES)
@pytest.mark.parametrize("window, with_sinks", [(-1, False), (-1, True), (40, False), (40, True)])
def test_output_and_gradients_are_those_of_float64(
    size: int, window: int, with_sinks: bool
) -> None:
    pack = pack_with_shared_prompts()
    rows = [torch.randn(pack.num_tokens, n, size, device="cuda", dtype=BF16) for n in (8, 2, 2)]
    sinks = [torch.randn(8, device="cuda", dtype=BF16)] if with_sinks else []
    grad = torch.randn_like(rows[0])
    results = {}
    for dtype, attention in ((BF16, attend), (torch.float64, padded_attention)):
        inputs = [x.to(dtype).requires_grad_() for x in rows + sinks]
        changes = ScoreChanges(inputs[3] if with_sinks else None, None)
        out = attention(*inputs[:3], pack, size**-0.5, window, changes)
        results[dtype] = [out, *torch.autograd.grad(out, inputs, grad.to(dtype))]
    for found, wanted in zip(*results.values(), strict=True):
        assert ((found.double() - wanted).norm() / wanted.norm()).item() < 1e-2


@needs_the_package
def test_deterministic_gradients_repeat_bit_for_bit() -> None:
    pack = pack_with_shared_prompts()
    shapes = [(pack.num_tokens, heads, 128) for heads in (8, 2, 2)]
    inputs = [torch.randn(s, device="cuda", dtype=BF16, requires_grad=True) for s in shapes]
    grad = torch.randn_like(inputs[0])
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        passes = [torch.autograd.grad(attend(*inputs, pack, 0.1), inputs, grad) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(before)
    for other in passes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(passes[0], other, strict=True))
