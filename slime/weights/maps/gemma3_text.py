"""Gemma 3 (text): norms before and after attention and MLP with weights around 0, GELU, scaled embeddings, and layers
with a sliding window, which have another RoPE base."""

from __future__ import annotations

from slime.weights.maps.family import (
    Entry,
    Family,
    HfConfig,
    Settings,
    attention_entries,
    dense_settings,
    mlp_entries,
    require_without,
)

NOT_BUILT = ("use_bidirectional_attention", "final_logit_softcapping", "attn_logit_softcapping", "attention_bias")


def settings(config: HfConfig) -> Settings:
    require_without(config, *NOT_BUILT)
    if (activation := config["hidden_activation"]) != "gelu_pytorch_tanh":
        raise ValueError(f"Gemma 3 with hidden_activation {activation!r} has no Megatron map: use --train-backend fsdp")
    return dense_settings(config) | {
        "swiglu": False,
        "gelu_tanh": True,
        "apply_layernorm_1p": True,
        "qk_layernorm": True,
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
        "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
        "embedding_scale": config["hidden_size"] ** 0.5,
    }


def layer(settings: Settings, index: int) -> list[Entry]:
    hf, megatron = f"model.layers.{index}.", f"decoder.layers.{index}."
    norms = {
        "input_layernorm": "input_layernorm",
        "self_attn_bda.norm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "mlp_bda.norm": "post_feedforward_layernorm",
    }
    return [
        *(Entry(f"{megatron}{ours}.weight", (f"{hf}{theirs}.weight",)) for ours, theirs in norms.items()),
        *attention_entries(settings, index),
        *mlp_entries(f"{hf}mlp.", f"{megatron}mlp."),
    ]


FAMILY = Family("gemma3_text", ("gemma3_text",), settings, layer)
