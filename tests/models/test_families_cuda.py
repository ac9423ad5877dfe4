"""Attention sinks and layers with a state on CUDA: the kernel against masks, and models against the
CPU.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch
from every_family import save_tiny
from family_checks import samples
from test_packed_attention import layout_of
from torch import nn

from slime.models.inputs import InputBuilder
from slime.models.loading import backbone_of, load_hf_model
from slime.models.masked_attention import ScoreChanges
from slime.models.packed_attention import NAME, attend, padded_attention
from slime.models.packed_layers import prepare_packing
from slime.models.scorer import PolicyScorer
from slime.models.segments import PackSegments

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("window", [-1, 40])
def test_kernel_with_sinks_equals_masks(window: int, share: bool) -> None:
    layout = layout_of([(300, [200, 17, 130]), (5, [700]), (90, [1, 33])], share)
    pack = PackSegments.from_layout(layout, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [
        (len(layout.tokens), 8, 64),
        (len(layout.tokens), 2, 64),
        (len(layout.tokens), 2, 64),
        (8,),
    ]
    inputs = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in shapes
    ]
    results = []
    for dtype, function in ((torch.bfloat16, attend), (torch.float32, padded_attention)):
        q, k, v, sinks = (x.detach().to(dtype, copy=True).requires_grad_() for x in inputs)
        out = function(q, k, v, pack, 0.125, window, ScoreChanges(sinks))
        weights = torch.cos(torch.arange(out.numel(), device="cuda")).view_as(out)
        results.append(
            [out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v, sinks))]
        )
    for got, want in zip(*results, strict=True):
        assert (got.float() - want).norm() <= 1e-2 * want.norm()


def without_kernels(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the modeling code compute with PyTorch alone: where flash-linear-attention is installed,
    transformers calls its kernels for tensors on the CPU too."""
    for code in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
            if hasattr(code, name):
                monkeypatch.setattr(code, name, inspect.unwrap(getattr(code, name)))


@pytest.mark.parametrize(
    "family", ["gpt-oss", "Gemma 2", "Qwen3-Next", "Qwen3.5", "LFM2", "Nemotron-H"]
)
def test_families_equal_the_cpu(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = save_tiny(
        family, tmp_path, **({} if family in ("LFM2", "Nemotron-H") else {"head_dim": 16})
    )
    results = []
    for device in ("cpu", "cuda"):
        model = load_hf_model(folder, torch.float32, device, NAME)
        stateful = prepare_packing(model)
        builder = InputBuilder(
            backbone_of(model), torch.device(device), pad_to_multiple=16, stateful=stateful
        )
        with monkeypatch.context() as patch:
            if device == "cpu":
                without_kernels(model, patch)
            scores = PolicyScorer(model)(builder.build(*samples(), [None] * 10))[0].log_probs
            scores.sum().backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        results.append((scores.detach().cpu(), float(norm)))
    assert (results[0][0] - results[1][0]).abs().max() < 1e-3
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-3)
