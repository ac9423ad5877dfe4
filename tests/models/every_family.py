"""A tiny random model of every family of docs/en/models.md, from transformers' own config
classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from needs import needs_transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

VOCAB = 61
PAD = 7  # inside the vocabulary: samples contain it, and its embedding is trained
SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.2,
    pad_token_id=PAD,
    bos_token_id=1,
    eos_token_id=2,
)
DELTA: dict[str, Any] = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8
)
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
SHARED: dict[str, Any] = dict(shared_expert_intermediate_size=16)
LATENT: dict[str, Any] = dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=12,
    head_dim=4,
    num_key_value_heads=4,
)
ROUTED: dict[str, Any] = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
# with few heads, scores tie at 0
INDEXER: dict[str, Any] = dict(index_n_heads=32, index_head_dim=8, index_topk=4)
MAMBA: dict[str, Any] = dict(
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_chunk_size=8,
    mamba_d_ssm=64,
)
HYBRID: dict[str, Any] = dict(layer_types=["linear_attention", "full_attention"])
SLIDING: dict[str, Any] = dict(
    layer_types=["sliding_attention", "full_attention"], sliding_window=5
)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {}),
    "Qwen3-MoE": ("Qwen3MoeConfig", EXPERTS),
    "Qwen3-Next": ("Qwen3NextConfig", DELTA | EXPERTS | SHARED | HYBRID),
    "Qwen3.5": ("Qwen3_5TextConfig", DELTA | HYBRID),
    "Qwen3.5-MoE": ("Qwen3_5MoeTextConfig", DELTA | EXPERTS | SHARED | HYBRID),
    "gpt-oss": ("GptOssConfig", dict(num_local_experts=4, num_experts_per_tok=2) | SLIDING),
    "Gemma 2": (
        "Gemma2Config",
        dict(attn_logit_softcapping=2.0, final_logit_softcapping=2.0) | SLIDING,
    ),
    "Gemma 3": ("Gemma3TextConfig", SLIDING),
    "Gemma 4": (
        "Gemma4TextConfig",
        SLIDING
        | dict(
            hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, initializer_range=0.1
        ),
    ),
    "Mistral": ("MistralConfig", dict(sliding_window=5)),
    "Phi-3": ("Phi3Config", {}),
    "OLMo-3": ("Olmo3Config", SLIDING),
    "Granite": ("GraniteConfig", dict(logits_scaling=8.0)),
    "Seed-OSS": ("SeedOssConfig", {}),
    "SmolLM3": ("SmolLM3Config", {}),
    "MiniMax-M2": ("MiniMaxM2Config", dict(num_local_experts=4, num_experts_per_tok=2)),
    "GLM-4": ("Glm4Config", {}),
    "GLM-4.5": ("Glm4MoeConfig", ROUTED),
    "GLM-4.7-Flash": ("Glm4MoeLiteConfig", LATENT | ROUTED),
    "DeepSeek V3": ("DeepseekV3Config", LATENT | ROUTED),
    "DeepSeek V3.2": ("DeepseekV32Config", LATENT | ROUTED | INDEXER),
    "GLM-5": ("GlmMoeDsaConfig", LATENT | ROUTED | INDEXER),
    "LFM2": (
        "Lfm2Config",
        dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    ),
    "Nemotron-H": (
        "NemotronHConfig",
        dict(
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
            mamba_num_heads=4,
            mamba_head_dim=8,
            ssm_state_size=8,
            n_groups=2,
            conv_kernel=4,
            chunk_size=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            moe_shared_expert_intermediate_size=16,
            n_group=1,
            topk_group=1,
        ),
    ),
    "Qwen2-MoE": ("Qwen2MoeConfig", EXPERTS | SHARED),
    "Mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2)),
    "Exaone 4": ("Exaone4Config", SLIDING),
    "Bamba": ("BambaConfig", MAMBA | dict(attn_layer_indices=[1])),
    "Granite 4": (
        "GraniteMoeHybridConfig",
        MAMBA
        | HYBRID
        | dict(num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=48),
    ),
    "Falcon-H1": ("FalconH1Config", MAMBA),
    "Llama 4": (
        "Llama4TextConfig",
        dict(num_local_experts=2, intermediate_size_mlp=48, interleave_moe_layer_step=1)
        | dict(no_rope_layer_interval=2, attention_chunk_size=5, floor_scale=4, attn_scale=0.5),
    ),
}
"""The config class of each family, and what its config has besides :data:`SMALL`."""


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    name, own = FAMILIES[family]
    settings = SMALL | own | changes
    if family == "Nemotron-H":
        needs_transformers("5.13", "it names the kinds of Nemotron-H's layers otherwise before")
        del settings["num_hidden_layers"]
    config: PreTrainedConfig = getattr(transformers, name)(**settings)
    return config


def save_tiny(family: str, folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    with torch.no_grad():
        # 0 in a new model, where gradients are huge
        model.get_input_embeddings().weight[PAD].normal_(std=0.2)
        for name, parameter in model.named_parameters():
            # biases and norms too are not those of a new model
            if parameter.dim() < 2 and "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder
