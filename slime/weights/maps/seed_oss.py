"""Seed-OSS: biases on query, key and value."""

from __future__ import annotations

from slime.weights.maps.family import Family, HfConfig, Settings, decoder_layer, dense_settings, require_without


def settings(config: HfConfig) -> Settings:
    require_without(config, "attention_out_bias", "mlp_bias")
    return dense_settings(config) | {"add_qkv_bias": bool(config.get("attention_bias"))}


FAMILY = Family("seed_oss", ("seed_oss",), settings, decoder_layer)
