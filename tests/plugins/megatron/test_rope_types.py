"""What config.json has and the Megatron backend does not build, such as rotary positions, is
refused, never left out."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from slime.plugins.megatron.maps.family import get_family

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def settings(family: str, config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    given = config(num_hidden_layers=2).to_dict() | {"rope_parameters": rope}
    return get_family(family).settings(given)


@pytest.mark.parametrize(
    ("family", "config"), [("qwen2", Qwen2Config), ("qwen3", Qwen3Config), ("llama", LlamaConfig)]
)
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
def test_types_of_dense_models_that_are_not_built(family: str, config: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"rope_type '{kind}' .*use --train-backend fsdp"):
        settings(family, config, {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0})


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3"])
def test_latent_attention_has_yarn_only(kind: str) -> None:
    with pytest.raises(ValueError, match=f"rope_type '{kind}' .*supports default, yarn"):
        settings(
            "deepseek_v3", DeepseekV3Config, {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
        )
    assert settings("deepseek_v3", DeepseekV3Config, YARN)["rope_type"] == "yarn"


@pytest.mark.parametrize("more", [{"attention_factor": 1.2}, {"truncate": False}])
def test_what_megatron_does_not_take_of_yarn(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="attention_factor or truncate"):
        settings("deepseek_v3", DeepseekV3Config, {**YARN, **more})


def test_the_scale_of_yarn_is_that_of_transformers() -> None:
    """transformers takes mscale only together with mscale_all_dim; megatron-core takes each
    alone.
    """
    assert settings("deepseek_v3", DeepseekV3Config, {**YARN, "mscale": 0.7})["mscale"] == 1.0
    both = settings("deepseek_v3", DeepseekV3Config, {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5})
    assert (both["mscale"], both["mscale_all_dim"]) == (0.7, 0.5)
    with pytest.raises(ValueError, match=r"mscale_all_dim.*--train-backend"):
        settings("deepseek_v3", DeepseekV3Config, {**YARN, "mscale_all_dim": 0.5})


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_rotary_features_that_are_not_neighbours_in_latent_attention_are_refused(
    family: str,
) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=2).to_dict()
    assert get_family(family).settings(config)["multi_latent_attention"]
    with pytest.raises(ValueError, match=r"rope_interleave=false .*use --train-backend fsdp"):
        get_family(family).settings({**config, "rope_interleave": False})


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_groups_of_experts_that_megatron_scores_otherwise_are_refused(family: str) -> None:
    """transformers scores a group by its best two experts, megatron-core by as many as it takes
    from each.
    """
    config = AutoConfig.for_model(family, num_hidden_layers=2).to_dict() | {
        "n_group": 8,
        "num_experts_per_tok": 8,
    }
    assert get_family(family).settings({**config, "topk_group": 4})["moe_router_group_topk"] == 4
    with pytest.raises(
        ValueError, match=r"topk_group 2 .*num_experts_per_tok 8 .*use --train-backend fsdp"
    ):
        get_family(family).settings({**config, "topk_group": 2})


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", "deepseek_v3", "phi3", "minimax_m2", "qwen3_next"]
)
def test_another_activation_is_refused(family: str) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=4).to_dict()
    assert get_family(family).settings(config)["swiglu"]
    with pytest.raises(ValueError, match=r"hidden_act 'gelu' .*use --train-backend fsdp"):
        get_family(family).settings({**config, "hidden_act": "gelu"})


def test_the_key_of_older_files_counts() -> None:
    config = DeepseekV3Config(num_hidden_layers=2).to_dict()
    config.pop("rope_parameters", None)
    with pytest.raises(ValueError, match="rope_type 'linear'"):
        get_family("deepseek_v3").settings(
            {**config, "rope_scaling": {"type": "linear", "factor": 2.0}}
        )


@pytest.mark.parametrize(
    "change",
    [
        {"final_logit_softcapping": 30.0},
        {"use_bidirectional_attention": True},
        {"attention_bias": True},
        {"hidden_activation": "gelu"},
    ],
)
def test_what_the_map_of_gemma_3_lacks_is_refused(change: dict[str, Any]) -> None:
    config = Gemma3TextConfig(num_hidden_layers=2).to_dict()
    assert get_family("gemma3_text").settings(config)["window_size"] == [4095, 0]
    with pytest.raises(ValueError, match=f"{next(iter(change))}.*--train-backend"):
        get_family("gemma3_text").settings(config | change)


def test_layers_with_a_window_of_unknown_size_are_refused() -> None:
    config = Gemma3TextConfig(num_hidden_layers=2).to_dict()
    with pytest.raises(ValueError, match="sliding_window"):
        get_family("gemma3_text").settings({**config, "sliding_window": None})


def test_positions_of_layers_with_a_window_are_checked_too() -> None:
    config = Gemma3TextConfig(num_hidden_layers=2).to_dict()
    rope = {
        **config["rope_parameters"],
        "sliding_attention": {"rope_type": "dynamic", "rope_theta": 1e4},
    }
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        get_family("gemma3_text").settings({**config, "rope_parameters": rope})


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "attention_bias"),
        ("granite", "mlp_bias"),
        ("seed_oss", "attention_out_bias"),
        ("olmo3", "attention_bias"),
        ("smollm3", "mlp_bias"),
        ("qwen3", "attention_bias"),
        ("qwen3_moe", "attention_bias"),
    ],
)
def test_biases_without_a_place_in_the_map_are_refused(family: str, key: str) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=4).to_dict()
    assert get_family(family).settings(config)["num_layers"] == 4
    with pytest.raises(ValueError, match=f"{family}.*{key}.*--train-backend"):
        get_family(family).settings({**config, key: True})
