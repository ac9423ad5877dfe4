"""Llama 2 and 3, and models with the same architecture (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from slime.weights.maps.family import Family, HfConfig, Settings, decoder_layer, dense_settings, require_without


def settings(config: HfConfig) -> Settings:
    require_without(config, "attention_bias", "mlp_bias")
    return dense_settings(config)


FAMILY = Family("llama", ("llama",), settings, decoder_layer)
