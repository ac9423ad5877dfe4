"""Rotary positions of config.json that the Megatron backend does not build are refused, never left out."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV3Config, LlamaConfig, Qwen2Config, Qwen3Config

from slime.weights.maps.registry import get_family

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def settings(family: str, config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    given = config(num_hidden_layers=2).to_dict() | {"rope_parameters": rope}
    return get_family(family).settings(given)


@pytest.mark.parametrize(("family", "config"), [("qwen2", Qwen2Config), ("qwen3", Qwen3Config), ("llama", LlamaConfig)])
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
def test_types_of_dense_models_that_are_not_built(family: str, config: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"rope_type '{kind}' .*use --train-backend fsdp"):
        settings(family, config, {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0})


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3"])
def test_latent_attention_has_yarn_only(kind: str) -> None:
    with pytest.raises(ValueError, match=f"rope_type '{kind}' .*supports default, yarn"):
        settings("deepseek_v3", DeepseekV3Config, {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0})
    assert settings("deepseek_v3", DeepseekV3Config, YARN)["rope_type"] == "yarn"


@pytest.mark.parametrize("more", [{"attention_factor": 1.2}, {"truncate": False}])
def test_what_megatron_does_not_take_of_yarn(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="attention_factor or truncate"):
        settings("deepseek_v3", DeepseekV3Config, {**YARN, **more})


def test_the_key_of_older_files_counts() -> None:
    config = DeepseekV3Config(num_hidden_layers=2).to_dict()
    config.pop("rope_parameters", None)
    with pytest.raises(ValueError, match="rope_type 'linear'"):
        get_family("deepseek_v3").settings({**config, "rope_scaling": {"type": "linear", "factor": 2.0}})
