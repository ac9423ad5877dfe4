"""The check at start: what packing would get wrong is refused before any training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
)

from slime.models.inputs import InputBuilder
from slime.models.loading import ModelError, load_hf_model
from slime.models.packed_attention import NAME
from slime.models.scorer import PolicyScorer, check_backward, check_scorer

SMALL: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2
)
HEADS: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)


def scorer_of(config: Any, path: Path, attention: str = NAME) -> tuple[PolicyScorer, InputBuilder]:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    model = load_hf_model(path, torch.float32, "cpu", attention)
    return PolicyScorer(model), InputBuilder(
        model.base_model, torch.device("cpu"), packed=attention == NAME
    )


@pytest.mark.parametrize("attention", [NAME, "sdpa", "eager"])
def test_llama_passes(tmp_path: Path, attention: str) -> None:
    scorer, builder = scorer_of(LlamaConfig(**SMALL, **HEADS), tmp_path, attention)
    assert check_scorer(scorer, builder) < 1e-4
    assert scorer.hf.config._attn_implementation == attention


@pytest.mark.parametrize(
    "config",
    [
        GraniteConfig(**SMALL, **HEADS, logits_scaling=8.0),
        CohereConfig(**SMALL, **HEADS, logit_scale=0.25),
        Gemma2Config(**SMALL, **HEADS, head_dim=8, final_logit_softcapping=1.0),
    ],
    ids=["granite", "cohere", "gemma2"],
)
def test_families_that_change_their_logits(tmp_path: Path, config: Any) -> None:
    scorer, builder = scorer_of(config, tmp_path)
    assert check_scorer(scorer, builder) < 1e-4
    scorer.logit_scale, scorer.logit_cap = 1.0, None
    with pytest.raises(ModelError, match="differ from the model's own"):
        check_scorer(scorer, builder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_pass_that_a_kernel_refuses(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As flash-linear-attention does on Hopper with some releases of Triton: the forward pass
    works.
    """
    scorer, builder = scorer_of(LlamaConfig(**SMALL, **HEADS), tmp_path)
    builder = dataclasses.replace(builder, float_dtype=dtype)
    check_backward(scorer, builder)
    assert all(parameter.grad is None for parameter in scorer.parameters())

    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("please install tilelang")

    mlp = scorer.hf.model.layers[1].mlp
    plain = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda x: Refuses.apply(plain(x)))
    with pytest.raises(ModelError, match=r"LlamaForCausalLM.*cpu.*tilelang"):
        check_backward(scorer, builder)


def test_missing_folder_and_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_hf_model(tmp_path / "nowhere", torch.float32, "cpu")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_hf_model(tmp_path, torch.float32, "cpu")


def test_entropy_and_logits_of_capped_logits(tmp_path: Path) -> None:
    config = Gemma2Config(**SMALL, **HEADS, head_dim=8, final_logit_softcapping=1.0)
    scorer, builder = scorer_of(config, tmp_path)
    scorer.chunk_size = 2
    inputs = builder.build([torch.arange(3, 12)], [6], [0], [None])
    scores, logits = scorer(
        inputs, temperature=0.5, with_entropy=True, entropy_grad=True, with_logits=True
    )
    log_p = logits.log_softmax(-1)
    torch.testing.assert_close(scores.log_probs, log_p.gather(1, inputs.targets[:, None])[:, 0])
    torch.testing.assert_close(scores.entropy, -(log_p.exp() * log_p).sum(-1))
    assert scores.entropy.requires_grad and float(logits.detach().abs().max()) <= 2.0
