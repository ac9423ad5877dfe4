"""MiniMax-M2: experts in every layer, sigmoid router with a bias per expert, RoPE on a part of each head, and norms of
queries and keys over all heads together."""

from __future__ import annotations

from slime.weights.maps.family import (
    COLUMNS,
    Entry,
    Family,
    HfConfig,
    Settings,
    attention_entries,
    dense_settings,
    moe_settings,
    norm_entries,
)
from slime.weights.maps.glm4_moe import sigmoid_router
from slime.weights.maps.layouts import Stacked


def settings(config: HfConfig) -> Settings:
    return (
        dense_settings(config)
        | moe_settings({**config, "moe_intermediate_size": config["intermediate_size"]})
        | sigmoid_router(config)
        | {"moe_layer_freq": 1, "qk_layernorm": True, "qk_norm_over_heads": True}
    )


def layer(settings: Settings, index: int) -> list[Entry]:
    hf, megatron = f"model.layers.{index}.block_sparse_moe.", f"decoder.layers.{index}.mlp."
    expert, count = f"{hf}experts.{{expert}}.", settings["num_experts"]
    return [
        *norm_entries(index),
        *attention_entries(settings, index),
        Entry(f"{megatron}router.weight", (f"{hf}gate.weight",)),
        Entry(f"{megatron}router.expert_bias", (f"{hf}e_score_correction_bias",)),
        Entry(f"{megatron}experts.gate_up", (f"{expert}w1.weight", f"{expert}w3.weight"), Stacked(), experts=count),
        Entry(f"{megatron}experts.down", (f"{expert}w2.weight",), COLUMNS, experts=count),
    ]


FAMILY = Family("minimax_m2", ("minimax_m2",), settings, layer)
