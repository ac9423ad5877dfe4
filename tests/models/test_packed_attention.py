"""Packed attention (shared prompts or not) against a dense mask in float64, outputs and
gradients.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from slime.data.packing import PackLayout, build_pack
from slime.models.cpu_kernels import packed_attention_cpu
from slime.models.loading import ModelError
from slime.models.masked_attention import ScoreChanges
from slime.models.packed_attention import NAME, attend, packed_attention, padded_attention
from slime.models.segments import PackSegments

Groups = list[tuple[int, list[int]]]  # prompt length, response lengths


def layout_of(groups: Groups, share: bool) -> PackLayout:
    rng = np.random.default_rng(0)
    tokens, responses, keys = [], [], []
    for key, (prompt_len, response_lens) in enumerate(groups):
        prompt = rng.integers(1, 100, prompt_len)
        for length in response_lens:
            tokens.append(np.concatenate([prompt, rng.integers(1, 100, length)]))
            responses.append(length)
            keys.append(key)
    return build_pack(tokens, responses, keys, share_prompts=share)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackLayout,
    scale: float,
    window: int = -1,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One softmax row per query over exactly the keys that its segment lists."""
    mask = torch.zeros(len(q), len(q), dtype=torch.bool)
    for start, length, ranges in zip(layout.q_starts, layout.q_lens, layout.kv_ranges, strict=True):
        keys = np.concatenate([np.arange(*r) for r in ranges])
        for i in range(length):
            seen = keys[: len(keys) - length + i + 1]
            mask[start + i, seen[-(window + 1) :] if window >= 0 else seen] = True
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(q)], v)


def tensors(layout: PackLayout, heads: int, kv_heads: int, value_dim: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(heads, 8), (kv_heads, 8), (kv_heads, value_dim), (heads, value_dim)]
    return [torch.randn(len(layout.tokens), *shape, generator=generator) for shape in shapes]


def assert_equal_to_dense(
    function: object, layout: PackLayout, inputs: list[Tensor], window: int = -1
) -> None:
    pack = PackSegments.from_layout(layout, "cpu")
    *qkv, seed = inputs
    mine = [x.clone().requires_grad_() for x in qkv]
    exact = [x.double().requires_grad_() for x in qkv]
    extra = (window,) if window >= 0 else ()
    out = function(*mine, pack, 0.3, *extra)  # type: ignore[operator]
    want = dense(*exact, layout, 0.3, window)
    torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-6)
    grads = torch.autograd.grad(out, mine, seed)
    expected = torch.autograd.grad(want, exact, seed.double())
    for got, exact_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(got.double(), exact_grad, rtol=1e-4, atol=1e-5)


groups = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(0, 17), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(groups=groups, share=st.booleans(), kv_heads=st.sampled_from([1, 2, 4]))
def test_cpu_kernel_equals_dense(groups: Groups, share: bool, kv_heads: int) -> None:
    layout = layout_of(groups, share)
    assert_equal_to_dense(packed_attention_cpu, layout, tensors(layout, 4, kv_heads))


@settings(max_examples=25, deadline=None)
@given(groups=groups, share=st.booleans(), window=st.sampled_from([-1, 0, 3]))
def test_general_way_equals_dense(groups: Groups, share: bool, window: int) -> None:
    layout = layout_of(groups, share)
    assert_equal_to_dense(padded_attention, layout, tensors(layout, 4, 2, value_dim=6), window)


def test_long_segments_cross_the_kernels_blocks() -> None:
    layout = layout_of([(700, [1100, 40, 500]), (3, [2000])], share=True)
    inputs = tensors(layout, 2, 1)
    assert_equal_to_dense(packed_attention_cpu, layout, inputs)


@settings(max_examples=40, deadline=None)
@given(
    groups=groups,
    share=st.booleans(),
    window=st.sampled_from([-1, 0, 3]),
    softcap=st.sampled_from([None, 1.5]),
)
def test_sinks_and_soft_caps_equal_dense(
    groups: Groups, share: bool, window: int, softcap: float | None
) -> None:
    layout = layout_of(groups, share)
    pack = PackSegments.from_layout(layout, "cpu")
    *qkv, seed = tensors(layout, 4, 2)
    inputs = [*qkv, torch.tensor([0.5, -1.0, 2.0, 0.0])]
    mine = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    out = attend(*mine[:3], pack, 0.3, window, ScoreChanges(mine[3], softcap))
    want = dense(*exact[:3], layout, 0.3, window, exact[3], softcap)
    torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-6)
    for got, gradient in zip(
        torch.autograd.grad(out, mine, seed),
        torch.autograd.grad(want, exact, seed.double()),
        strict=True,
    ):
        torch.testing.assert_close(got.double(), gradient, rtol=1e-4, atol=1e-5)


def test_many_queries_are_computed_in_parts() -> None:
    layout = layout_of([(300, [700, 900]), (3, [40])], share=True)
    assert_equal_to_dense(padded_attention, layout, tensors(layout, 2, 1), window=50)


class Attention(nn.Module):
    is_causal = True


def run(
    module: nn.Module | None = None, mask: Tensor | None = None, pack: bool = True, **kwargs: object
) -> Tensor:
    layout = layout_of([(3, [4, 5])], share=True)
    q, k, v, _ = tensors(layout, 4, 2)
    heads = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    if pack:
        kwargs["slime_pack"] = PackSegments.from_layout(layout, "cpu")
    return packed_attention(module or Attention(), *heads, mask, **kwargs)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [3, 4, 5, 6])
def test_a_window_of_about_the_longest_sample_equals_dense(window: int) -> None:
    """A window that hides nothing may be left out, and one that hides a single key of a single
    query may not.
    """
    layout = layout_of([(2, [4]), (1, [2])], False)
    inputs = tensors(layout, 2, 1)
    out = attend(*inputs[:3], PackSegments.from_layout(layout, "cpu"), 0.3, window)
    torch.testing.assert_close(out, dense(*inputs[:3], layout, 0.3, window))


def test_interface_function_shape_and_window() -> None:
    full = run()
    assert full.shape == (1, 12, 4, 8)
    torch.testing.assert_close(run(sliding_window=100), full)
    assert not torch.allclose(run(sliding_window=2), full)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"position_bias": torch.zeros(4)}, "position biases"),
        ({"mask": torch.zeros(1, 1, 2, 2)}, "attention mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
        ({"pack": False}, "the pack"),
    ],
)
def test_what_would_be_wrong_is_refused(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        run(**kwargs)  # type: ignore[arg-type]


@torch.no_grad()
def test_a_window_that_is_in_the_mask_of_transformers_only() -> None:
    """Phi-3.5-MoE does not pass its window to the attention, and packs have no mask of
    transformers.
    """
    from transformers import PhimoeConfig, PhimoeForCausalLM

    sizes = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        initializer_range=0.5,
    )
    heads = dict(
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, sliding_window=4
    )
    torch.manual_seed(0)
    model = PhimoeForCausalLM(PhimoeConfig(**sizes, **heads)).eval()
    ids = torch.randint(0, 64, (1, 24))
    plain = model(input_ids=ids, use_cache=False).logits
    model.set_attn_implementation(NAME)
    layout = build_pack([ids[0].numpy()], [1], [0])
    positions = torch.from_numpy(layout.positions)[None]
    packed = model(
        input_ids=ids,
        position_ids=positions,
        slime_pack=PackSegments.from_layout(layout, "cpu"),
        use_cache=False,
    )
    torch.testing.assert_close(packed.logits, plain, rtol=0, atol=1e-4)
