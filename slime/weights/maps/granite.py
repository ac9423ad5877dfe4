"""Granite 3: Llama's architecture with factors on embeddings, attention, residuals and logits."""

from __future__ import annotations

from slime.weights.maps.family import Family, HfConfig, Settings, decoder_layer, dense_settings, require_without


def settings(config: HfConfig) -> Settings:
    require_without(config, "attention_bias", "mlp_bias")
    return dense_settings(config) | {
        "embedding_scale": float(config["embedding_multiplier"]),
        "softmax_scale": float(config["attention_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "logit_scale": 1.0 / config["logits_scaling"],
    }


FAMILY = Family("granite", ("granite",), settings, decoder_layer)
