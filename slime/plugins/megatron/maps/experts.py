"""The families of models with experts, also those whose latent attention is to the keys that an indexer
selects.
"""

from __future__ import annotations

from typing import Any

from slime.plugins.megatron.maps import REPLICATED, Interleaved, Stacked, Transposed
from slime.plugins.megatron.maps.dense import qwen3_settings
from slime.plugins.megatron.maps.family import (
    COLUMNS,
    ROWS,
    Entry,
    Family,
    HfConfig,
    Settings,
    attention_entries,
    decoder_layer,
    dense_settings,
    expert_entries,
    mlp_entries,
    moe_layers,
    moe_settings,
    norm_entries,
    require_silu,
    rope_type,
)

# GLM-4.5, 4.6 and 4.7: sigmoid router with a bias per expert, shared experts, dense first layers.


def sigmoid_router(config: HfConfig) -> Settings:
    """Return the settings of a router as in DeepSeek V3.

    It chooses experts with a bias per expert, and the weights of the chosen experts sum to
    ``routed_scaling_factor``.
    """
    if not config.get("norm_topk_prob", True):
        raise ValueError(
            "a sigmoid router with norm_topk_prob=false has no Megatron map: use --train-backend "
            "fsdp"
        )
    settings: Settings = {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor") or 1.0),
    }
    if (config.get("n_group") or 1) > 1:
        chosen = config["topk_group"]
        topk = config["num_experts_per_tok"]
        # transformers scores a group by its best two experts, megatron-core by so many
        if topk // chosen != 2:
            raise ValueError(
                f"{config['model_type']} with n_group {config['n_group']}, topk_group {chosen} "
                f"and num_experts_per_tok {topk} has no Megatron map, only with twice as many "
                "experts as groups: use --train-backend fsdp"
            )
        settings |= {"moe_router_num_groups": config["n_group"], "moe_router_group_topk": chosen}
    return settings


def expert_settings(config: HfConfig) -> Settings:
    """Return the settings of experts with a sigmoid router and shared experts. Some layers may be
    dense.
    """
    layers = config["num_hidden_layers"]
    dense = config.get("first_k_dense_replace") or 0
    types = config.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (layers - dense)
    return (
        moe_settings(config)
        | sigmoid_router(config)
        | {
            "moe_shared_expert_intermediate_size": config["moe_intermediate_size"]
            * (config.get("n_shared_experts") or 0)
            or None,
            "moe_layer_freq": [int(kind == "sparse") for kind in types],
        }
    )


def glm4_moe_settings(config: HfConfig) -> Settings:
    return (
        dense_settings(config)
        | expert_settings(config)
        | {
            "add_qkv_bias": bool(config.get("attention_bias")),
            "qk_layernorm": bool(config.get("use_qk_norm")),
        }
    )


GLM4_MOE = Family("glm4_moe", ("glm4_moe",), glm4_moe_settings, decoder_layer)


# Qwen3 with experts (30B-A3B, 235B-A22B): softmax router.


def qwen3_moe_settings(config: HfConfig) -> Settings:
    layers = config["num_hidden_layers"]
    dense = set(config.get("mlp_only_layers") or [])
    step = config.get("decoder_sparse_step", 1)
    frequency = [int(i not in dense and (i + 1) % step == 0) for i in range(layers)]
    return (
        qwen3_settings(config)
        | moe_settings(config)
        | {
            "moe_layer_freq": 1 if all(frequency) else frequency,
            # if normalized, softmax over chosen experts
            "moe_router_pre_softmax": not config.get("norm_topk_prob"),
        }
    )


QWEN3_MOE = Family("qwen3_moe", ("qwen3_moe",), qwen3_moe_settings, decoder_layer)


# DeepSeek V3 and R1, Moonlight, Kimi K2: latent attention (MLA), sigmoid router, shared experts.


def deepseek_v3_settings(config: HfConfig) -> Settings:
    if config.get("attention_bias"):
        raise ValueError(
            "latent attention with attention_bias has no Megatron map: use --train-backend fsdp"
        )
    # megatron-core always turns neighboring features together
    if config.get("rope_interleave") is False:
        raise ValueError(
            "latent attention with rope_interleave=false has no Megatron map: use "
            "--train-backend fsdp"
        )
    require_silu(config)
    return (
        {
            "num_layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "ffn_hidden_size": config["intermediate_size"],
            "num_attention_heads": config["num_attention_heads"],
            "multi_latent_attention": True,
            "q_lora_rank": config.get("q_lora_rank"),
            "kv_lora_rank": config["kv_lora_rank"],
            "qk_head_dim": config["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
            "v_head_dim": config["v_head_dim"],
            "qk_layernorm": True,
            "swiglu": True,
            "normalization": "RMSNorm",
            "norm_epsilon": config["rms_norm_eps"],
            "add_bias_linear": False,
            "position_embedding_type": "rope",
            "vocab_size": config["vocab_size"],
            "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
            "max_position_embeddings": config["max_position_embeddings"],
        }
        | _rotary(config)
        | expert_settings(config)
    )


def _rotary(config: HfConfig) -> Settings:
    """Return the settings of plain rotary positions or YaRN.

    The softmax scale depends on ``mscale_all_dim``, in Megatron as in transformers.

    Raises:
        ValueError: The type is another one, or YaRN has a parameter that megatron-core's latent
            attention lacks.
    """
    rope: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = rope.get("rope_theta", config.get("rope_theta"))
    if rope_type(rope, ("default", "yarn")) == "default":
        return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}
    if rope.get("attention_factor") is not None or rope.get("truncate") is False:
        raise ValueError(
            "YaRN with attention_factor or truncate=false has no Megatron map: use "
            "--train-backend fsdp"
        )
    if rope.get("mscale_all_dim") and not rope.get("mscale"):
        raise ValueError(
            "YaRN with mscale_all_dim without mscale has no Megatron map: use --train-backend fsdp"
        )
    return {
        "rope_type": "yarn",
        "rotary_base": base,
        "rotary_scaling_factor": rope["factor"],
        # transformers ignores mscale alone
        "mscale": rope["mscale"] if rope.get("mscale_all_dim") else 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        "beta_fast": rope.get("beta_fast", 32.0),
        "beta_slow": rope.get("beta_slow", 1.0),
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", 4096),
    }


def deepseek_v3_layer(settings: Settings, index: int) -> list[Entry]:
    hf = f"model.layers.{index}."
    megatron = f"decoder.layers.{index}."
    experts = moe_layers(settings)[index]
    return [
        *norm_entries(index),
        *latent_attention(settings, f"{hf}self_attn.", f"{megatron}self_attention."),
        *(
            expert_entries(settings, f"{hf}mlp.", f"{megatron}mlp.")
            if experts
            else mlp_entries(f"{hf}mlp.", f"{megatron}mlp.")
        ),
    ]


def latent_attention(settings: Settings, hf: str, megatron: str) -> list[Entry]:
    """Return the entries of latent attention, with low-rank projections for key-values and, with
    ``q_lora_rank``, for queries."""
    if settings.get("q_lora_rank"):
        query = [
            Entry(f"{megatron}linear_q_down_proj.weight", (f"{hf}q_a_proj.weight",)),
            Entry(f"{megatron}q_layernorm.weight", (f"{hf}q_a_layernorm.weight",)),
            Entry(f"{megatron}linear_q_up_proj.weight", (f"{hf}q_b_proj.weight",), ROWS),
        ]
    else:
        query = [Entry(f"{megatron}linear_q_proj.weight", (f"{hf}q_proj.weight",), ROWS)]
    return [
        *query,
        Entry(f"{megatron}linear_kv_down_proj.weight", (f"{hf}kv_a_proj_with_mqa.weight",)),
        Entry(f"{megatron}kv_layernorm.weight", (f"{hf}kv_a_layernorm.weight",)),
        Entry(f"{megatron}linear_kv_up_proj.weight", (f"{hf}kv_b_proj.weight",), ROWS),
        Entry(f"{megatron}linear_proj.weight", (f"{hf}o_proj.weight",), COLUMNS),
    ]


DEEPSEEK_V3 = Family(
    "deepseek_v3", ("deepseek_v3", "kimi_k2", "moonlight"), deepseek_v3_settings, deepseek_v3_layer
)


# GLM-4.7-Flash: the attention of DeepSeek V3 and the experts of GLM-4.5.

GLM4_MOE_LITE = Family("glm4_moe_lite", ("glm4_moe_lite",), deepseek_v3_settings, deepseek_v3_layer)


# MiniMax-M2: experts in every layer, sigmoid router with a bias per expert, RoPE on a part of each
# head, and norms of queries and keys over all heads together.


def minimax_m2_settings(config: HfConfig) -> Settings:
    return (
        dense_settings(config)
        | moe_settings({**config, "moe_intermediate_size": config["intermediate_size"]})
        | sigmoid_router(config)
        | {"moe_layer_freq": 1, "qk_layernorm": True, "qk_norm_over_heads": True}
    )


def minimax_m2_layer(settings: Settings, index: int) -> list[Entry]:
    hf = f"model.layers.{index}.block_sparse_moe."
    megatron = f"decoder.layers.{index}.mlp."
    expert = f"{hf}experts.{{expert}}."
    count = settings["num_experts"]
    return [
        *norm_entries(index),
        *attention_entries(settings, index),
        Entry(f"{megatron}router.weight", (f"{hf}gate.weight",)),
        Entry(f"{megatron}router.expert_bias", (f"{hf}e_score_correction_bias",)),
        Entry(
            f"{megatron}experts.gate_up",
            (f"{expert}w1.weight", f"{expert}w3.weight"),
            Stacked(),
            experts=count,
        ),
        Entry(f"{megatron}experts.down", (f"{expert}w2.weight",), COLUMNS, experts=count),
    ]


MINIMAX_M2 = Family("minimax_m2", ("minimax_m2",), minimax_m2_settings, minimax_m2_layer)


# gpt-oss (20B, 120B): attention sinks, windows in every other layer, experts with biases and
# clamped SwiGLU.

QUICK_GELU_ALPHA = 1.702
"""The factor inside the sigmoid of megatron-core's ``quick_gelu``."""


def gpt_oss_settings(config: HfConfig) -> Settings:
    """Return the settings.

    Raises:
        ValueError: The config has no biases, or another factor in its activation.
    """
    if config["swiglu_alpha"] != QUICK_GELU_ALPHA or not config["attention_bias"]:
        raise ValueError(
            f"gpt-oss with swiglu_alpha {config['swiglu_alpha']} and attention_bias "
            f"{config['attention_bias']} has no Megatron map, only with {QUICK_GELU_ALPHA} and "
            "True: use --train-backend fsdp"
        )
    return (
        dense_settings(config)
        | moe_settings({**config, "moe_intermediate_size": config["intermediate_size"]})
        | {
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "swiglu": False,
            "quick_geglu": True,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": config["swiglu_limit"],
            "softmax_type": "learnable",
            "moe_router_pre_softmax": False,
        }
    )


def gpt_oss_layer(settings: Settings, index: int) -> list[Entry]:
    hf = f"model.layers.{index}."
    megatron = f"decoder.layers.{index}."
    count = settings["num_experts"]
    experts = {
        "gate_up": ("gate_up_proj", Interleaved()),
        "gate_up_bias": ("gate_up_proj_bias", Interleaved()),
        "down": ("down_proj", Transposed()),
        "down_bias": ("down_proj_bias", REPLICATED),
    }
    return [
        *norm_entries(index),
        *attention_entries(settings, index),
        Entry(f"{megatron}self_attention.linear_proj.bias", (f"{hf}self_attn.o_proj.bias",)),
        Entry(
            f"{megatron}self_attention.core_attention.softmax_offset",
            (f"{hf}self_attn.sinks",),
            ROWS,
        ),
        *(
            Entry(f"{megatron}mlp.router.{name}", (f"{hf}mlp.router.{name}",))
            for name in ("weight", "bias")
        ),
        *(
            Entry(
                f"{megatron}mlp.experts.{name}",
                (f"{hf}mlp.experts.{theirs}",),
                layout,
                experts=count,
            )
            for name, (theirs, layout) in experts.items()
        ),
    ]


GPT_OSS = Family("gpt_oss", ("gpt_oss",), gpt_oss_settings, gpt_oss_layer)


# DeepSeek V3.2: DeepSeek V3 with an indexer in each layer.


def deepseek_v32_settings(config: HfConfig) -> Settings:
    layers = config["num_hidden_layers"]
    return deepseek_v3_settings(config) | {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": config["index_n_heads"],
        "dsa_indexer_head_dim": config["index_head_dim"],
        "dsa_indexer_topk": config["index_topk"],
        "indexer_types": config.get("indexer_types") or ["full"] * layers,
    }


def deepseek_v32_layer(settings: Settings, index: int) -> list[Entry]:
    if settings["indexer_types"][index] == "shared":
        return deepseek_v3_layer(settings, index)
    names = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
    return [
        *deepseek_v3_layer(settings, index),
        *(
            Entry(
                f"decoder.layers.{index}.self_attention.core_attention.indexer.{name}",
                (f"model.layers.{index}.self_attn.indexer.{name}",),
            )
            for name in names
        ),
    ]


DEEPSEEK_V32 = Family("deepseek_v32", ("deepseek_v32",), deepseek_v32_settings, deepseek_v32_layer)


# GLM-5: the same, with rotary positions of the indexer in neighboring features. Layers may share the
# selection of the last layer with an indexer of its own.

GLM_MOE_DSA = Family("glm_moe_dsa", ("glm_moe_dsa",), deepseek_v32_settings, deepseek_v32_layer)
