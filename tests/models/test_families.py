"""Kinds of layers in packs: some families here, all of docs/en/models.md in
tests/docs/test_models_page.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from every_family import save_tiny, tiny_config
from family_checks import CPU, check_packed, samples
from torch import nn
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, MambaConfig

from slime.models.inputs import InputBuilder
from slime.models.layer_kinds import layers_of
from slime.models.loading import ModelError, backbone_of, load_hf_model
from slime.models.packed_attention import NAME
from slime.models.packed_layers import prepare_packing
from slime.models.scorer import PolicyScorer


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("gpt-oss", False),
        ("Gemma 2", True),
        ("Qwen3.5", False),
        ("Nemotron-H", True),
        ("Llama 4", False),
    ],
)
def test_packs_equal_one_sequence_at_a_time(family: str, tied: bool, tmp_path: Path) -> None:
    check_packed(save_tiny(family, tmp_path, tie_word_embeddings=tied))


def test_layers_that_share_the_selection_of_an_indexer(tmp_path: Path) -> None:
    types = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
    check_packed(save_tiny("GLM-5", tmp_path, **types))


def test_layers_with_an_indexer_have_another_name_in_older_transformers() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("GLM-5"))
    model.config.layer_types = ["deepseek_sparse_attention"] * 2
    assert [kind.name for kind in layers_of(model, "").kinds] == ["sparse indexer"]


def test_a_tensor_that_cannot_be_divided_among_sequences_is_refused(tmp_path: Path) -> None:
    model = load_hf_model(save_tiny("Llama 4", tmp_path), torch.float32, "cpu", NAME)
    builder = InputBuilder(backbone_of(model), CPU, stateful=prepare_packing(model))
    tokens, responses, groups = samples()
    inputs = builder.build(tokens, responses, groups, [None] * len(tokens))
    model.model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"per_row": torch.zeros(1)}), with_kwargs=True
    )
    with pytest.raises(
        ModelError, match=r"Llama4TextAttention gets 'per_row'.*use --attn-implementation sdpa"
    ):
        PolicyScorer(model)(inputs)


def test_a_hybrid_family_may_have_a_model_with_attention_only() -> None:
    sizes = dict(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=4,
        mamba_d_head=16,
    )
    config = GraniteMoeHybridConfig(
        vocab_size=61,
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        num_local_experts=0,
        **sizes,
    )
    model = AutoModelForCausalLM.from_config(config)
    assert model._is_stateful
    assert [kind.name for kind in layers_of(model, "").kinds] == ["full attention"]


def test_a_layer_of_no_known_kind_is_refused() -> None:
    beside = AutoModelForCausalLM.from_config(tiny_config("Falcon-H1"))
    beside.model.layers[0].mamba = nn.Linear(32, 32)
    with pytest.raises(ModelError, match="hybrid"):
        layers_of(beside, "")
    mamba = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2)
    )
    with pytest.raises(ModelError, match=r"linear_attention.*--attn-implementation"):
        prepare_packing(mamba)
    hybrid = AutoModelForCausalLM.from_config(tiny_config("Qwen3.5"))
    hybrid.model.layers[0].linear_attn = nn.Linear(32, 32)
    with pytest.raises(ModelError, match="linear_attention"):
        layers_of(hybrid, "")


def test_a_model_is_a_list_of_kinds() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("gpt-oss"))
    kinds = [[kind.name for kind in kinds] for _, kinds in layers_of(model, "").layers]
    assert kinds == [["sliding window", "attention sinks"], ["full attention", "attention sinks"]]
