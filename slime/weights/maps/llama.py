"""Llama 2 and 3, and models with the same architecture (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from slime.weights.maps.family import Family, HfConfig, Settings, decoder_layer, dense_settings


def settings(config: HfConfig) -> Settings:
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError("Llama with attention_bias or mlp_bias has no Megatron map: use --train-backend fsdp")
    return dense_settings(config)


FAMILY = Family("llama", ("llama",), settings, decoder_layer)
