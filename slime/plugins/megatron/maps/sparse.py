"""The families of models with latent attention to the keys that an indexer selects."""

from __future__ import annotations

from slime.plugins.megatron.maps.experts import deepseek_v3_layer, deepseek_v3_settings
from slime.plugins.megatron.maps.family import Entry, Family, HfConfig, Settings

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
