"""Experts by grouped products against the experts of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slime.models.grouped_experts import NAME, use_grouped_experts

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
cuda = pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")])


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
    return {"logits": logits.detach().float()} | {n: g.float() for n, g in zip(names, gradients, strict=True)}


@pytest.mark.parametrize("device", ["cpu", cuda])
@pytest.mark.parametrize("name", MODELS)
def test_experts_equal_those_of_transformers(name: str, device: str) -> None:
    model = build(name, device)
    model.set_experts_implementation("eager")
    expected = outputs(model, device)
    model.set_experts_implementation("grouped_mm")
    assert use_grouped_experts(model)
    found = outputs(model, device)
    used = {module.config._experts_implementation for module in model.modules() if hasattr(module, "has_bias")}
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
