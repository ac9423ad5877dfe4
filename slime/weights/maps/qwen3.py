"""Qwen3 dense: norms on query and key heads."""

from __future__ import annotations

from slime.weights.maps.family import Family, HfConfig, Settings, decoder_layer, dense_settings, require_without


def settings(config: HfConfig) -> Settings:
    require_without(config, "attention_bias")  # the output projection has one too
    return dense_settings(config) | {"qk_layernorm": True, "add_qkv_bias": False}


FAMILY = Family("qwen3", ("qwen3",), settings, decoder_layer)
