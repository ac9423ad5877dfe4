"""Qwen3 with experts (30B-A3B, 235B-A22B): softmax router."""

from __future__ import annotations

from slime.weights.maps import qwen3
from slime.weights.maps.family import Family, HfConfig, Settings, decoder_layer, moe_settings


def settings(config: HfConfig) -> Settings:
    layers = config["num_hidden_layers"]
    dense = set(config.get("mlp_only_layers") or [])
    step = config.get("decoder_sparse_step", 1)
    frequency = [int(i not in dense and (i + 1) % step == 0) for i in range(layers)]
    return (
        qwen3.settings(config)
        | moe_settings(config)
        | {
            "moe_layer_freq": 1 if all(frequency) else frequency,
            "moe_router_pre_softmax": not config.get("norm_topk_prob"),  # if normalized, softmax over chosen experts
        }
    )


FAMILY = Family("qwen3_moe", ("qwen3_moe",), settings, decoder_layer)
