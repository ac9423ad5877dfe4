"""The families of dense models."""

from __future__ import annotations

from slime.plugins.megatron.maps.family import (
    COLUMNS,
    Entry,
    Family,
    HfConfig,
    Settings,
    attention_entries,
    decoder_layer,
    dense_settings,
    mlp_entries,
    norm_entries,
    query_key_value,
    require_without,
)

# Llama 2 and 3, and models with the same architecture (SmolLM2, TinyLlama, ...).


def llama_settings(config: HfConfig) -> Settings:
    require_without(config, "attention_bias", "mlp_bias")
    return dense_settings(config)


LLAMA = Family("llama", ("llama",), llama_settings, decoder_layer)


# Mistral 7B, Nemo and Small (text): Llama's architecture, in the first ones with a sliding window
# in every layer.

MISTRAL = Family("mistral", ("mistral",), dense_settings, decoder_layer)


# Qwen2 and Qwen2.5: biases on query, key and value.


def qwen2_settings(config: HfConfig) -> Settings:
    return dense_settings(config) | {"add_qkv_bias": True}


QWEN2 = Family("qwen2", ("qwen2",), qwen2_settings, decoder_layer)


# Qwen3 dense: norms on query and key heads.


def qwen3_settings(config: HfConfig) -> Settings:
    require_without(config, "attention_bias")  # the output projection has one too
    return dense_settings(config) | {"qk_layernorm": True, "add_qkv_bias": False}


QWEN3 = Family("qwen3", ("qwen3",), qwen3_settings, decoder_layer)


# Phi-3 and Phi-4: one matrix for query, key and value, and one for gate and up projection.


def phi3_layer(settings: Settings, index: int) -> list[Entry]:
    hf = f"model.layers.{index}."
    megatron = f"decoder.layers.{index}."
    qkv = query_key_value(settings, fused=True)
    return [
        *norm_entries(index),
        Entry(
            f"{megatron}self_attention.linear_qkv.weight", (f"{hf}self_attn.qkv_proj.weight",), qkv
        ),
        Entry(
            f"{megatron}self_attention.linear_proj.weight",
            (f"{hf}self_attn.o_proj.weight",),
            COLUMNS,
        ),
        *mlp_entries(f"{hf}mlp.", f"{megatron}mlp.", fused=True),
    ]


PHI3 = Family("phi3", ("phi3",), dense_settings, phi3_layer)


# OLMo-3: norms only after attention and MLP, norms of queries and keys over all heads, sliding
# windows.


def olmo3_settings(config: HfConfig) -> Settings:
    require_without(config, "attention_bias")
    return dense_settings(config) | {
        "without_input_norms": True,
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
        "qk_layernorm": True,
        "qk_norm_over_heads": True,
    }


def olmo3_layer(settings: Settings, index: int) -> list[Entry]:
    hf = f"model.layers.{index}."
    megatron = f"decoder.layers.{index}."
    return [
        Entry(f"{megatron}self_attn_bda.norm.weight", (f"{hf}post_attention_layernorm.weight",)),
        Entry(f"{megatron}mlp_bda.norm.weight", (f"{hf}post_feedforward_layernorm.weight",)),
        *attention_entries(settings, index),
        *mlp_entries(f"{hf}mlp.", f"{megatron}mlp."),
    ]


OLMO3 = Family("olmo3", ("olmo3",), olmo3_settings, olmo3_layer)


# Granite 3: Llama's architecture with factors on embeddings, attention, residuals and logits.


def granite_settings(config: HfConfig) -> Settings:
    require_without(config, "attention_bias", "mlp_bias")
    return dense_settings(config) | {
        "embedding_scale": float(config["embedding_multiplier"]),
        "softmax_scale": float(config["attention_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "logit_scale": 1.0 / config["logits_scaling"],
    }


GRANITE = Family("granite", ("granite",), granite_settings, decoder_layer)


# Seed-OSS: biases on query, key and value.


def seed_oss_settings(config: HfConfig) -> Settings:
    require_without(config, "attention_out_bias", "mlp_bias")
    return dense_settings(config) | {"add_qkv_bias": bool(config.get("attention_bias"))}


SEED_OSS = Family("seed_oss", ("seed_oss",), seed_oss_settings, decoder_layer)


# SmolLM3: Llama's architecture, without rotary positions in every fourth layer.


def smollm3_settings(config: HfConfig) -> Settings:
    require_without(config, "attention_bias", "mlp_bias")
    return dense_settings(config) | {
        "no_rope_freq": [int(not turns) for turns in config["no_rope_layers"]]
    }


SMOLLM3 = Family("smollm3", ("smollm3",), smollm3_settings, decoder_layer)


# GLM-4-0414 and GLM-Z1 (9B, 32B): norms also after attention and MLP, interleaved RoPE on half of
# each head.


def glm4_settings(config: HfConfig) -> Settings:
    return dense_settings(config) | {
        "add_qkv_bias": bool(config.get("attention_bias")),
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
        "rotary_interleaved": True,
    }


def glm4_layer(settings: Settings, index: int) -> list[Entry]:
    hf = f"model.layers.{index}."
    megatron = f"decoder.layers.{index}."
    return [
        *norm_entries(index),
        Entry(f"{megatron}self_attn_bda.norm.weight", (f"{hf}post_self_attn_layernorm.weight",)),
        Entry(f"{megatron}mlp_bda.norm.weight", (f"{hf}post_mlp_layernorm.weight",)),
        *attention_entries(settings, index),
        *mlp_entries(f"{hf}mlp.", f"{megatron}mlp.", fused=True),
    ]


GLM4 = Family("glm4", ("glm4",), glm4_settings, glm4_layer)


# Gemma 3 (text): norms before and after attention and MLP with weights around 0, GELU, scaled
# embeddings, and layers with a sliding window, which have another RoPE base.

GEMMA3_NOT_BUILT = (
    "use_bidirectional_attention",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "attention_bias",
)


def gemma3_text_settings(config: HfConfig) -> Settings:
    require_without(config, *GEMMA3_NOT_BUILT)
    if (activation := config["hidden_activation"]) != "gelu_pytorch_tanh":
        raise ValueError(
            f"Gemma 3 with hidden_activation {activation!r} has no Megatron map: use "
            "--train-backend fsdp"
        )
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


def gemma3_text_layer(settings: Settings, index: int) -> list[Entry]:
    hf = f"model.layers.{index}."
    megatron = f"decoder.layers.{index}."
    norms = {
        "input_layernorm": "input_layernorm",
        "self_attn_bda.norm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "mlp_bda.norm": "post_feedforward_layernorm",
    }
    return [
        *(
            Entry(f"{megatron}{ours}.weight", (f"{hf}{theirs}.weight",))
            for ours, theirs in norms.items()
        ),
        *attention_entries(settings, index),
        *mlp_entries(f"{hf}mlp.", f"{megatron}mlp."),
    ]


GEMMA3_TEXT = Family("gemma3_text", ("gemma3_text",), gemma3_text_settings, gemma3_text_layer)
