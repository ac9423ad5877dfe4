"""SmolLM3: Llama's architecture, without rotary positions in every fourth layer."""

from __future__ import annotations

from slime.weights.maps.family import Family, HfConfig, Settings, decoder_layer, dense_settings, require_without


def settings(config: HfConfig) -> Settings:
    require_without(config, "attention_bias", "mlp_bias")
    return dense_settings(config) | {"no_rope_freq": [int(not turns) for turns in config["no_rope_layers"]]}


FAMILY = Family("smollm3", ("smollm3",), settings, decoder_layer)
