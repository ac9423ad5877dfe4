"""Qwen2 and Qwen2.5: biases on query, key and value."""

from __future__ import annotations

from slime.weights.maps.family import Family, HfConfig, Settings, decoder_layer, dense_settings


def settings(config: HfConfig) -> Settings:
    if config.get("use_sliding_window"):
        raise ValueError("Qwen2 with use_sliding_window is not supported: the Megatron backend has full attention only")
    return dense_settings(config) | {"add_qkv_bias": True}


FAMILY = Family("qwen2", ("qwen2",), settings, decoder_layer)
