"""Qwen3 dense: norms on query and key heads."""

from __future__ import annotations

from slime.weights.maps.family import Family, HfConfig, Settings, decoder_layer, dense_settings


def settings(config: HfConfig) -> Settings:
    return dense_settings(config) | {"qk_layernorm": True, "add_qkv_bias": bool(config.get("attention_bias"))}


FAMILY = Family("qwen3", ("qwen3",), settings, decoder_layer)
