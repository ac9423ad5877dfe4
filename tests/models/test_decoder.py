"""Parts of Hugging Face models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from slime.models.loading import decoder_layers, one_layer_of_each_kind

SMALL: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=32,
)
DELTA = dict(
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
    num_hidden_layers=8,
)  # fmt: skip
EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    num_hidden_layers=6,
    mlp_only_layers=[0, 4],
)
MODELS: list[tuple[str, dict[str, Any], int]] = [
    ("LlamaConfig", dict(num_hidden_layers=6), 1),
    ("Qwen3_5TextConfig", DELTA, 4),  # three gated delta nets, then full attention
    ("GptOssConfig", dict(num_hidden_layers=6, num_local_experts=4), 2),  # sliding, full
    # five sliding, then full
    ("Gemma3TextConfig", dict(num_hidden_layers=12, sliding_window=8), 6),
    ("Qwen3MoeConfig", EXPERTS, 2),  # dense, experts
    (
        "Qwen2Config",
        dict(num_hidden_layers=6, use_sliding_window=True, sliding_window=8, max_window_layers=4),
        5,
    ),
]


@pytest.mark.parametrize(("kind", "values", "count"), MODELS, ids=[kind for kind, _, _ in MODELS])
def test_the_first_layers_that_contain_each_kind(
    kind: str, values: dict[str, Any], count: int
) -> None:
    config = getattr(transformers, kind)(**SMALL | values)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    layers, names = decoder_layers(model), [name for name, _ in model.named_parameters()]
    ids = torch.arange(6)[None]
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        with one_layer_of_each_kind(model):
            assert decoder_layers(model) == layers[:count]
            assert torch.isfinite(model(input_ids=ids, use_cache=False).logits).all()
        assert decoder_layers(model) == layers
        assert [name for name, _ in model.named_parameters()] == names
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def test_all_layers_are_back_after_an_error() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_hidden_layers=3))
    with pytest.raises(ValueError, match="no"), one_layer_of_each_kind(model):
        raise ValueError("no")
    assert len(decoder_layers(model)) == 3
