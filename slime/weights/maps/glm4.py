"""GLM-4-0414 and GLM-Z1 (9B, 32B): norms also after attention and MLP, interleaved RoPE on half of each head."""

from __future__ import annotations

from slime.weights.maps.family import (
    COLUMNS,
    Entry,
    Family,
    HfConfig,
    Settings,
    attention_entries,
    dense_settings,
    norm_entries,
)
from slime.weights.maps.layouts import Stacked


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
        Entry(f"{megatron}mlp.linear_fc1.weight", (f"{hf}mlp.gate_up_proj.weight",), Stacked(fused=True)),
        Entry(f"{megatron}mlp.linear_fc2.weight", (f"{hf}mlp.down_proj.weight",), COLUMNS),
    ]


FAMILY = Family("glm4", ("glm4",), settings, layer)
