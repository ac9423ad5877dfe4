"""The families of models with gated delta nets."""

from __future__ import annotations

from collections.abc import Callable

from slime.plugins.megatron.maps import COLUMNS, REPLICATED, ROWS, ByHead, Layout
from slime.plugins.megatron.maps.dense import qwen3_settings
from slime.plugins.megatron.maps.experts import qwen3_moe_settings
from slime.plugins.megatron.maps.family import (
    Entry,
    Family,
    HfConfig,
    Settings,
    attention_entries,
    expert_entries,
    mlp_entries,
    moe_layers,
    norm_entries,
)

# Qwen3-Next (80B-A3B): gated delta nets and gated attention, norms of 1 + weight, a shared expert
# with a gate.

DELTA_NET_SHAPE = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")


def qwen3_next_settings(config: HfConfig) -> Settings:
    if config.get("attention_bias"):
        raise ValueError(
            "gated attention with attention_bias has no Megatron map: use --train-backend fsdp"
        )
    width = config.get("intermediate_size") or config["moe_intermediate_size"]
    # The norm of the router's weights is not in all configs, but all models have it. No layer has a
    # window.
    shape = {"norm_topk_prob": True, **config, "intermediate_size": width, "layer_types": None}
    found = {
        "attention_output_gate": True,
        "use_gated_attention": True,
        "apply_layernorm_1p": True,
        "linear_attention_freq": [
            int(kind == "linear_attention") for kind in config["layer_types"]
        ],
        **{f"linear_{name}": config[f"linear_{name}"] for name in DELTA_NET_SHAPE},
    }
    if not config.get("num_experts"):
        return qwen3_settings(shape) | found
    shared = {
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }
    return qwen3_moe_settings(shape) | found | shared


def qwen3_next_layouts(settings: Settings) -> dict[str, Layout]:
    """Return the layouts of the parameters of a gated delta net, by their names in the checkpoint.

    The projection of query, key, value and gate, and that of b and a, have the heads one after the
    other.
    """
    return {**inner_layouts(settings), "in_proj_qkvz.weight": ROWS, "in_proj_ba.weight": ROWS}


def inner_layouts(settings: Settings) -> dict[str, Layout]:
    """Return the layouts of all parameters but the input projections."""
    shared = {"A_log": ROWS, "dt_bias": ROWS, "norm.weight": REPLICATED, "out_proj.weight": COLUMNS}
    return {**shared, "conv1d.weight": query_key_value_rows(settings)}


def query_key_value_rows(settings: Settings) -> ByHead:
    """Return the layout of what has the rows of all queries, keys and values of a gated delta
    net.
    """
    heads, key, value = (
        settings[f"linear_{x}"] for x in ("num_key_heads", "key_head_dim", "value_head_dim")
    )
    return ByHead(
        heads=heads, sizes=(key, key, value * (settings["linear_num_value_heads"] // heads))
    )


def qwen3_next_layer(
    settings: Settings,
    index: int,
    layouts: Callable[[Settings], dict[str, Layout]] = qwen3_next_layouts,
) -> list[Entry]:
    """Return the entries of a layer. ``layouts`` returns those of the parameters of its gated delta
    net.
    """
    hf = f"model.layers.{index}."
    megatron = f"decoder.layers.{index}."
    mixer = (
        [
            Entry(
                f"{megatron}self_attention.weights.{name.removesuffix('.weight')}",
                (f"{hf}linear_attn.{name}",),
                layout,
            )
            for name, layout in layouts(settings).items()
        ]
        if settings["linear_attention_freq"][index]
        else attention_entries(settings, index)
    )
    dense = mlp_entries(f"{hf}mlp.", f"{megatron}mlp.")
    return [
        *norm_entries(index),
        *mixer,
        *(_experts(settings, index) if moe_layers(settings)[index] else dense),
    ]


def _experts(settings: Settings, index: int) -> list[Entry]:
    hf = f"model.layers.{index}.mlp."
    megatron = f"decoder.layers.{index}.mlp."
    return [
        *expert_entries({**settings, "moe_shared_expert_intermediate_size": None}, hf, megatron),
        *mlp_entries(f"{hf}shared_expert.", f"{megatron}shared_experts."),
        Entry(f"{megatron}shared_experts.gate_weight", (f"{hf}shared_expert_gate.weight",)),
    ]


QWEN3_NEXT = Family("qwen3_next", ("qwen3_next",), qwen3_next_settings, qwen3_next_layer)


# Qwen3.5 and Qwen3.6 (text), dense and with experts: Qwen3-Next's layers, with the delta net's projections in
# four matrices.


def qwen3_5_layouts(settings: Settings) -> dict[str, Layout]:
    """Return the layouts of the parameters of a gated delta net, by their names in the
    checkpoint.
    """
    gates: dict[str, Layout] = {f"in_proj_{name}.weight": ROWS for name in ("z", "b", "a")}
    projection = {"in_proj_qkv.weight": query_key_value_rows(settings)}
    return {**inner_layouts(settings), **gates, **projection}


def qwen3_5_layer(settings: Settings, index: int) -> list[Entry]:
    return qwen3_next_layer(settings, index, qwen3_5_layouts)


QWEN3_5 = Family(
    "qwen3_5",
    ("qwen3_5_text", "qwen3_5_moe_text"),
    qwen3_next_settings,
    qwen3_5_layer,
    text_prefix="model.language_model.",
)
