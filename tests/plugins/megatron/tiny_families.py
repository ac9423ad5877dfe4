"""A tiny random Hugging Face model of every family that has a Megatron map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fsdp_helpers import VOCAB
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    initializer_range=0.2,
    tie_word_embeddings=False,
    rms_norm_eps=1e-3,  # large, so that a norm with another one is seen
    pad_token_id=7,  # inside the vocabulary: samples contain it, and its embedding is trained
    bos_token_id=1,
    eos_token_id=2,
)
TIED: dict[str, Any] = dict(tie_word_embeddings=True)
EXPERTS: dict[str, Any] = dict(moe_intermediate_size=16, num_experts_per_tok=2)

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL | dict(tie_word_embeddings=True)),
    "llama3": LlamaConfig(
        **SMALL,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=500000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "qwen2": Qwen2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}),
    "qwen3": Qwen3Config(**SMALL | dict(head_dim=12, tie_word_embeddings=True)),
    "qwen3_moe": Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=4, norm_topk_prob=True),
    "qwen3_moe_sparse": Qwen3MoeConfig(
        **SMALL,
        **EXPERTS,
        num_experts=4,
        norm_topk_prob=False,
        mlp_only_layers=[1],
        decoder_sparse_step=1,
    ),
    "glm4": Glm4Config(**SMALL, attention_bias=True, partial_rotary_factor=0.5),
    "glm4_moe": Glm4MoeConfig(
        **SMALL,
        **EXPERTS,
        n_routed_experts=4,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        attention_bias=True,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
    ),
}

LATENT: dict[str, Any] = {
    k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")
} | dict(
    **EXPERTS,
    num_key_value_heads=4,
    kv_lora_rank=8,
    qk_nope_head_dim=12,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=4,
    n_shared_experts=2,
    routed_scaling_factor=2.5,
    first_k_dense_replace=1,
    # transformers takes 1e-6 for the norms within latent attention
)
CONFIGS |= {
    "deepseek_v3": DeepseekV3Config(
        **LATENT,
        q_lora_rank=12,
        n_group=2,
        topk_group=1,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=10000.0,
            factor=4.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            beta_fast=32,
            beta_slow=1,
            original_max_position_embeddings=32,
        ),
    ),
    "moonlight": DeepseekV3Config(**LATENT, q_lora_rank=None, n_group=1, topk_group=1),
    "glm4_moe_lite": Glm4MoeLiteConfig(
        **{name: value for name, value in LATENT.items() if name != "first_k_dense_replace"} | TIED,
        q_lora_rank=12,
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
    ),
}
# with few heads, scores tie at 0
INDEXER: dict[str, Any] = LATENT | dict(
    q_lora_rank=12, index_n_heads=32, index_head_dim=8, index_topk=4
)
CONFIGS |= {
    "deepseek_v32": DeepseekV32Config(
        **INDEXER, n_group=2, topk_group=1, rope_parameters=CONFIGS["deepseek_v3"].rope_parameters
    ),
    "glm_moe_dsa": GlmMoeDsaConfig(
        **INDEXER | TIED,
        n_group=1,
        topk_group=1,
        indexer_types=["full", "shared", "full", "shared"],
    ),
}
YARN: dict[str, Any] = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16
)
CONFIGS |= {
    "qwen3_yarn": Qwen3Config(**SMALL, rope_parameters=YARN),
    "glm4_yarn": Glm4Config(
        **SMALL | dict(head_dim=16),
        attention_bias=True,
        rope_parameters={
            **YARN,
            "attention_factor": 1.3,
            "beta_fast": 16,
            "partial_rotary_factor": 0.5,
        },
    ),
    "llama_linear": LlamaConfig(
        **SMALL, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
    ),
}
# a window shorter than the samples
CONFIGS |= {
    "mistral": MistralConfig(**SMALL, sliding_window=5),
    "mistral_tied": MistralConfig(**SMALL | dict(tie_word_embeddings=True), sliding_window=None),
    "qwen2_window": Qwen2Config(
        **{k: v for k, v in SMALL.items() if k != "head_dim"},
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
    ),
}
CONFIGS["gpt_oss"] = GptOssConfig(
    **SMALL,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=9,
    swiglu_limit=0.5,  # small, so that it clamps
    rope_parameters={**YARN, "rope_theta": 150000.0, "truncate": False},
)
MINIMAX: dict[str, Any] = SMALL | dict(
    num_experts_per_tok=2,
    num_local_experts=4,
    rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5),
)
CONFIGS |= {
    "minimax_m2": MiniMaxM2Config(**MINIMAX),
    "minimax_m2_tied": MiniMaxM2Config(**MINIMAX | dict(tie_word_embeddings=True)),
}
DELTA_NET: dict[str, Any] = SMALL | dict(
    # with larger weights, a state of several tokens amplifies rounding above the tolerances
    initializer_range=0.05,
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=8,
    linear_value_head_dim=4,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
)
SHARED: dict[str, Any] = EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=16)
CONFIGS |= {
    "qwen3_next": Qwen3NextConfig(**DELTA_NET, **SHARED, mlp_only_layers=[1]),
    "qwen3_next_tied": Qwen3NextConfig(**DELTA_NET | dict(tie_word_embeddings=True), **SHARED),
    "qwen3_5": Qwen3_5TextConfig(**DELTA_NET | dict(tie_word_embeddings=True)),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**DELTA_NET, **SHARED),
}
GEMMA: dict[str, Any] = SMALL | dict(
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    sliding_window=5,
    query_pre_attn_scalar=24,
)
CONFIGS |= {
    "gemma3": Gemma3TextConfig(**GEMMA | dict(tie_word_embeddings=True)),
    "gemma3_linear": Gemma3TextConfig(
        **GEMMA,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
        ),
    ),
}
NO_HEAD_DIM: dict[str, Any] = {name: value for name, value in SMALL.items() if name != "head_dim"}
CONFIGS |= {
    "phi3": Phi3Config(**NO_HEAD_DIM, sliding_window=5),
    "phi3_partial": Phi3Config(
        **NO_HEAD_DIM | TIED,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
    "olmo3": Olmo3Config(
        **NO_HEAD_DIM,
        layer_types=GEMMA["layer_types"],
        sliding_window=5,
        rope_parameters=dict(
            full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=1e4)
        ),
    ),
    "olmo3_tied": Olmo3Config(**NO_HEAD_DIM | TIED, sliding_window=5),
    "granite": GraniteConfig(
        **NO_HEAD_DIM | TIED,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.5,
        logits_scaling=1.5,
    ),
    "seed_oss": SeedOssConfig(**SMALL, attention_bias=True, attention_dropout=0.0),
    "seed_oss_tied": SeedOssConfig(**SMALL | TIED, attention_bias=False, attention_dropout=0.0),
    "smollm3": SmolLM3Config(**NO_HEAD_DIM, no_rope_layers=[1, 0, 1, 0]),
    "smollm3_window": SmolLM3Config(
        **NO_HEAD_DIM | TIED, no_rope_layers=[1, 0, 1, 0], use_sliding_window=True, sliding_window=5
    ),
}


def save_family(name: str, path: Path, seed: int = 0) -> Path:
    """All parameters random (norms and biases too), as a folder of float32 safetensors."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for place, parameter in [*model.named_parameters(), *_trained_buffers(model)]:
            if (parameter.ndim == 1 and "A_log" not in place) or place.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
        pad = model.get_input_embeddings().weight[CONFIGS[name].pad_token_id]
        pad.copy_(torch.randn_like(pad) * 0.2)  # transformers starts it from 0
    model.save_pretrained(path)
    assert AutoConfig.from_pretrained(path).model_type == CONFIGS[name].model_type
    return path


def _trained_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    ]
