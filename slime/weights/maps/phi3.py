"""Phi-3 and Phi-4: one matrix for query, key and value, and one for gate and up projection."""

from __future__ import annotations

from slime.weights.maps.family import (
    COLUMNS,
    Entry,
    Family,
    Settings,
    dense_settings,
    mlp_entries,
    norm_entries,
    query_key_value,
)


def layer(settings: Settings, index: int) -> list[Entry]:
    hf, megatron = f"model.layers.{index}.", f"decoder.layers.{index}."
    qkv = query_key_value(settings, fused=True)
    return [
        *norm_entries(index),
        Entry(f"{megatron}self_attention.linear_qkv.weight", (f"{hf}self_attn.qkv_proj.weight",), qkv),
        Entry(f"{megatron}self_attention.linear_proj.weight", (f"{hf}self_attn.o_proj.weight",), COLUMNS),
        *mlp_entries(f"{hf}mlp.", f"{megatron}mlp.", fused=True),
    ]


FAMILY = Family("phi3", ("phi3",), dense_settings, layer)
