"""Phi-3 and Phi-4: one matrix for query, key and value, and one for gate and up projection."""

from __future__ import annotations

from slime.weights.maps.family import (
    COLUMNS,
    Entry,
    Family,
    Settings,
    dense_settings,
    norm_entries,
    query_key_value,
)
from slime.weights.maps.layouts import Stacked


def layer(settings: Settings, index: int) -> list[Entry]:
    hf, megatron = f"model.layers.{index}.", f"decoder.layers.{index}."
    qkv = query_key_value(settings, fused=True)
    return [
        *norm_entries(index),
        Entry(f"{megatron}self_attention.linear_qkv.weight", (f"{hf}self_attn.qkv_proj.weight",), qkv),
        Entry(f"{megatron}self_attention.linear_proj.weight", (f"{hf}self_attn.o_proj.weight",), COLUMNS),
        Entry(f"{megatron}mlp.linear_fc1.weight", (f"{hf}mlp.gate_up_proj.weight",), Stacked(fused=True)),
        Entry(f"{megatron}mlp.linear_fc2.weight", (f"{hf}mlp.down_proj.weight",), COLUMNS),
    ]


FAMILY = Family("phi3", ("phi3",), dense_settings, layer)
