"""The check at start: what packing would get wrong is refused before any training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig, MambaConfig

from slime.models.inputs import InputBuilder
from slime.models.loading import ModelError, load_hf_model
from slime.models.packed_attention import NAME
from slime.models.scorer import PolicyScorer, check_packable, check_scorer

SMALL: dict[str, Any] = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
HEADS: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)


def scorer_of(config: Any, path: Path, attention: str = NAME) -> tuple[PolicyScorer, InputBuilder]:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    model = load_hf_model(path, torch.float32, "cpu", attention)
    return PolicyScorer(model), InputBuilder(model.base_model, torch.device("cpu"), packed=attention == NAME)


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
    ],
    ids=["granite", "cohere"],
)
def test_families_that_scale_their_logits(tmp_path: Path, config: Any) -> None:
    scorer, builder = scorer_of(config, tmp_path)
    assert check_scorer(scorer, builder) < 1e-4
    scorer.logit_scale = 1.0
    with pytest.raises(ModelError, match="differ from the model's own"):
        check_scorer(scorer, builder)


def test_soft_caps_are_refused_with_what_to_use(tmp_path: Path) -> None:
    scorer, builder = scorer_of(Gemma2Config(**SMALL, **HEADS, head_dim=8), tmp_path)
    with pytest.raises(ModelError, match=r"soft-capped attention scores.*--attn-implementation eager"):
        check_scorer(scorer, builder)


def test_recurrent_models_are_not_packed(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"linear_attention, which mix packed samples.*--attn-implementation sdpa"):
        check_packable(model)


def test_missing_folder_and_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_hf_model(tmp_path / "nowhere", torch.float32, "cpu")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_hf_model(tmp_path, torch.float32, "cpu")
