"""Qwen2 and Qwen2.5: biases on query, key and value."""

from __future__ import annotations

from slime.weights.maps.family import Family, HfConfig, Settings, decoder_layer, dense_settings


def settings(config: HfConfig) -> Settings:
    return dense_settings(config) | {"add_qkv_bias": True}


FAMILY = Family("qwen2", ("qwen2",), settings, decoder_layer)
