"""OLMo-3: norms only after attention and MLP, norms of queries and keys over all heads, sliding windows."""

from __future__ import annotations

from slime.weights.maps.family import (
    Entry,
    Family,
    HfConfig,
    Settings,
    attention_entries,
    dense_settings,
    mlp_entries,
    require_without,
)


def settings(config: HfConfig) -> Settings:
    require_without(config, "attention_bias")
    return dense_settings(config) | {
        "without_input_norms": True,
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
        "qk_layernorm": True,
        "qk_norm_over_heads": True,
    }


def layer(settings: Settings, index: int) -> list[Entry]:
    hf, megatron = f"model.layers.{index}.", f"decoder.layers.{index}."
    return [
        Entry(f"{megatron}self_attn_bda.norm.weight", (f"{hf}post_attention_layernorm.weight",)),
        Entry(f"{megatron}mlp_bda.norm.weight", (f"{hf}post_feedforward_layernorm.weight",)),
        *attention_entries(settings, index),
        *mlp_entries(f"{hf}mlp.", f"{megatron}mlp."),
    ]


FAMILY = Family("olmo3", ("olmo3",), settings, layer)
