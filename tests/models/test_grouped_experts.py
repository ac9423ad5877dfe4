"""The order of tokens by expert, and products of sorted rows, against plain indexing and against
transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.models.grouped_experts import NAME, use_grouped_experts
from slime.plugins.megatron.core import prepare


def _routing(tokens: int, experts: int, topk: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).topk(topk).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
    probs = torch.rand(tokens, experts, generator=generator, dtype=torch.float64) * routing_map
    return routing_map, probs


@pytest.mark.megatron
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 40), st.integers(1, 9), st.data())
def test_tokens_go_to_experts_and_back_as_with_megatron(
    tokens: int, experts: int, data: st.DataObject
) -> None:
    prepare()
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    from slime.models.grouped_experts import combine, order_by_expert, spread

    topk = data.draw(st.integers(1, experts))
    routing_map, probs = _routing(tokens, experts, topk, data.draw(st.integers(0, 99)))
    x, scale = (
        torch.randn(tokens, 6, dtype=torch.float64),
        torch.randn(tokens * topk, 6, dtype=torch.float64),
    )

    def passes(ours: bool) -> list[Tensor]:
        hidden, weights = x.clone().requires_grad_(), probs.clone().requires_grad_()
        if ours:
            order, row_weights, counts = order_by_expert(routing_map, weights, topk)
            rows = spread(hidden, order)
            out = combine(rows.square() * scale * row_weights[:, None], order)
        else:
            rows, row_weights, order = permute(
                hidden, routing_map, probs=weights, num_out_tokens=tokens * topk
            )
            counts = routing_map.sum(0)
            out = unpermute(
                rows.square() * scale * row_weights[:, None],
                order,
                hidden.shape,
                routing_map=routing_map,
            )
        (out**2).sum().backward()
        assert hidden.grad is not None and weights.grad is not None
        return [
            rows.detach(),
            row_weights.detach(),
            counts,
            out.detach(),
            hidden.grad,
            weights.grad,
        ]

    for name, mine, theirs in zip(
        ("rows", "weights", "counts", "out", "dx", "dw"), passes(True), passes(False), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.megatron
@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_chunks_move_as_with_megatron(sizes: list[int], random: object) -> None:
    prepare()
    from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

    from slime.models.grouped_experts import combine, order_of_chunks, spread

    chunks = list(range(len(sizes)))
    random.shuffle(chunks)  # type: ignore[attr-defined]
    counts, places = torch.tensor(sizes), torch.tensor(chunks)
    x = torch.randn(sum(sizes), 3)
    order = order_of_chunks(counts, places, len(x))
    moved = spread(x, order)
    assert torch.equal(moved, sort_chunks_by_idxs(x, counts, places)[0])
    assert torch.equal(combine(moved, order), x)


@pytest.mark.megatron
def test_the_rows_of_a_token_are_summed_in_float32() -> None:
    prepare()
    from slime.models.grouped_experts import combine, order_by_expert

    routing_map, probs = _routing(64, 16, 8, 0)
    order, _, _ = order_by_expert(routing_map, probs, 8)
    rows = torch.randn(512, 32).bfloat16()
    exact = rows.double()[order.slots].sum(1)
    assert torch.equal(combine(rows, order), exact.float().bfloat16())


@pytest.mark.megatron
def test_sorted_copies_of_tokens_are_made_again_and_not_kept() -> None:
    prepare()
    from slime.models.grouped_experts import grouped_linear, order_by_expert, spread
    from slime.plugins.megatron.modules import without_keeping

    routing_map, probs = _routing(10, 4, 2, 0)
    order, _, counts = order_by_expert(routing_map, probs, 2)
    torch.manual_seed(0)
    x, weight = torch.randn(10, 6), torch.randn(4, 3, 6)

    def gradients(remade: bool) -> list[Tensor]:
        hidden, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        up = lambda rows: grouped_linear(rows, w, counts)  # noqa: E731
        make = lambda tokens: spread(tokens, order)  # noqa: E731
        out = without_keeping(up, make, hidden) if remade else up(make(hidden))
        (out**2).sum().backward()
        return [t.grad for t in (hidden, w) if t.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


SMALL = dict(
    hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size=64,
)  # fmt: skip
MODELS = {
    "biases": ("GptOssConfig", dict(num_local_experts=5, num_experts_per_tok=3)),
    "gated": ("Qwen3MoeConfig", dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16)),
    "not gated": (
        "NemotronHConfig",
        dict(
            n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            layers_block_type=["moe", "attention"],
        ),
    ),
}  # fmt: skip
cuda = pytest.param(
    "cuda",
    marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")],
)


def build(name: str, device: str) -> Any:
    kind, values = MODELS[name]
    config = getattr(transformers, kind)(**SMALL | values)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("_bias"):
                parameter.normal_()
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def outputs(model: Any, device: str) -> dict[str, Tensor]:
    ids = torch.randint(64, (1, 48), generator=torch.Generator().manual_seed(1)).to(device)
    logits = model(ids).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(device)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad((logits.float() * weights).sum(), parameters)
    return {"logits": logits.detach().float()} | {
        n: g.float() for n, g in zip(names, gradients, strict=True)
    }


@pytest.mark.parametrize("device", ["cpu", cuda])
@pytest.mark.parametrize("name", MODELS)
def test_experts_equal_those_of_transformers(name: str, device: str) -> None:
    model = build(name, device)
    model.set_experts_implementation("eager")
    expected = outputs(model, device)
    model.set_experts_implementation("grouped_mm")
    assert use_grouped_experts(model)
    found = outputs(model, device)
    used = {
        module.config._experts_implementation
        for module in model.modules()
        if hasattr(module, "has_bias")
    }
    assert used == {NAME}
    for key, value in expected.items():
        limit = 2e-5 if device == "cpu" else 0.05
        assert (found[key] - value).norm() <= limit * value.norm() + 1e-8, key


def test_other_experts_are_left_alone() -> None:
    model = build("gated", "cpu")
    model.set_experts_implementation("eager")
    assert not use_grouped_experts(model)
    dense = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL))
    assert not use_grouped_experts(dense)
