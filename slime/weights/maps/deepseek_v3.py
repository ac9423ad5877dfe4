"""DeepSeek V3 and R1, Moonlight, Kimi K2: latent attention (MLA), sigmoid router, shared experts."""

from __future__ import annotations

from typing import Any

from slime.weights.maps.family import (
    COLUMNS,
    ROWS,
    Entry,
    Family,
    HfConfig,
    Settings,
    expert_entries,
    mlp_entries,
    moe_layers,
    norm_entries,
    require_silu,
    rope_type,
)
from slime.weights.maps.glm4_moe import expert_settings


def settings(config: HfConfig) -> Settings:
    if config.get("attention_bias"):
        raise ValueError("latent attention with attention_bias has no Megatron map: use --train-backend fsdp")
    if config.get("rope_interleave") is False:  # megatron-core always turns neighboring features together
        raise ValueError("latent attention with rope_interleave=false has no Megatron map: use --train-backend fsdp")
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
        ValueError: The type is another one, or YaRN has a parameter that megatron-core's latent attention lacks.
    """
    rope: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = rope.get("rope_theta", config.get("rope_theta"))
    if rope_type(rope, ("default", "yarn")) == "default":
        return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}
    if rope.get("attention_factor") is not None or rope.get("truncate") is False:
        raise ValueError("YaRN with attention_factor or truncate=false has no Megatron map: use --train-backend fsdp")
    if rope.get("mscale_all_dim") and not rope.get("mscale"):
        raise ValueError("YaRN with mscale_all_dim without mscale has no Megatron map: use --train-backend fsdp")
    return {
        "rope_type": "yarn",
        "rotary_base": base,
        "rotary_scaling_factor": rope["factor"],
        "mscale": rope["mscale"] if rope.get("mscale_all_dim") else 1.0,  # transformers ignores mscale alone
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        "beta_fast": rope.get("beta_fast", 32.0),
        "beta_slow": rope.get("beta_slow", 1.0),
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", 4096),
    }


def layer(settings: Settings, index: int) -> list[Entry]:
    hf, megatron = f"model.layers.{index}.", f"decoder.layers.{index}."
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
    """Return the entries of latent attention, with low-rank projections for key-values and, with ``q_lora_rank``, for
    queries."""
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


FAMILY = Family("deepseek_v3", ("deepseek_v3", "kimi_k2", "moonlight"), settings, layer)
