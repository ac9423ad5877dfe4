"""GLM-4-0414 and GLM-Z1 (9B, 32B): norms also after attention and MLP, interleaved RoPE on half of each head."""

from __future__ import annotations

from slime.weights.maps.family import (
    Entry,
    Family,
    HfConfig,
    Settings,
    attention_entries,
    dense_settings,
    mlp_entries,
    norm_entries,
)


def settings(config: HfConfig) -> Settings:
    return dense_settings(config) | {
        "add_qkv_bias": bool(config.get("attention_bias")),
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
        "rotary_interleaved": True,
    }


def layer(settings: Settings, index: int) -> list[Entry]:
    hf, megatron = f"model.layers.{index}.", f"decoder.layers.{index}."
    return [
        *norm_entries(index),
        Entry(f"{megatron}self_attn_bda.norm.weight", (f"{hf}post_self_attn_layernorm.weight",)),
        Entry(f"{megatron}mlp_bda.norm.weight", (f"{hf}post_mlp_layernorm.weight",)),
        *attention_entries(settings, index),
        *mlp_entries(f"{hf}mlp.", f"{megatron}mlp.", fused=True),
    ]


FAMILY = Family("glm4", ("glm4",), settings, layer)
