"""GLM-4.5, 4.6 and 4.7: sigmoid router with a bias per expert, shared experts, dense first layers."""

from __future__ import annotations

from slime.weights.maps.family import Family, HfConfig, Settings, decoder_layer, dense_settings, moe_settings


def sigmoid_router(config: HfConfig) -> Settings:
    """Return the settings of a router as in DeepSeek V3.

    It chooses experts with a bias per expert, and the weights of the chosen experts sum to ``routed_scaling_factor``.
    """
    if not config.get("norm_topk_prob", True):
        raise ValueError("a sigmoid router with norm_topk_prob=false has no Megatron map: use --train-backend fsdp")
    settings: Settings = {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor") or 1.0),
    }
    if (config.get("n_group") or 1) > 1:
        chosen, topk = config["topk_group"], config["num_experts_per_tok"]
        if topk // chosen != 2:  # transformers scores a group by its best two experts, megatron-core by so many
            raise ValueError(
                f"{config['model_type']} with n_group {config['n_group']}, topk_group {chosen} and num_experts_per_tok "
                f"{topk} has no Megatron map, only with twice as many experts as groups: use --train-backend fsdp"
            )
        settings |= {"moe_router_num_groups": config["n_group"], "moe_router_group_topk": chosen}
    return settings


def expert_settings(config: HfConfig) -> Settings:
    """Return the settings of experts with a sigmoid router and shared experts. Some layers may be dense."""
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace") or 0
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


def settings(config: HfConfig) -> Settings:
    return (
        dense_settings(config)
        | expert_settings(config)
        | {"add_qkv_bias": bool(config.get("attention_bias")), "qk_layernorm": bool(config.get("use_qk_norm"))}
    )


FAMILY = Family("glm4_moe", ("glm4_moe",), settings, decoder_layer)
