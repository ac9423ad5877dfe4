"""Qwen3-Next (80B-A3B): gated delta nets and gated attention, norms of 1 + weight, a shared expert with a gate."""

from __future__ import annotations

from slime.weights.maps import qwen3, qwen3_moe
from slime.weights.maps.family import (
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

NOT_DIVIDED = "the gated delta nets of this family are not divided among ranks"
DELTA_NET = ("A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight")
PROJECTIONS = ("in_proj_qkvz.weight", "in_proj_ba.weight")


def settings(config: HfConfig) -> Settings:
    if config.get("attention_bias"):
        raise ValueError("gated attention with attention_bias has no Megatron map: use --train-backend fsdp")
    width = config.get("intermediate_size") or config["moe_intermediate_size"]
    # The norm of the router's weights is not in all configs, but all models have it. No layer has a window.
    shape = {"norm_topk_prob": True, **config, "intermediate_size": width, "layer_types": None}
    found = {
        "attention_output_gate": True,
        "use_gated_attention": True,
        "apply_layernorm_1p": True,
        "linear_attention_freq": [int(kind == "linear_attention") for kind in config["layer_types"]],
    }
    if not config.get("num_experts"):
        return qwen3.settings(shape) | found
    shared = {
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }
    return qwen3_moe.settings(shape) | found | shared


def layer(settings: Settings, index: int, projections: tuple[str, ...] = PROJECTIONS) -> list[Entry]:
    """Return the entries of a layer. ``projections`` are the input projections of its gated delta net."""
    hf, megatron = f"model.layers.{index}.", f"decoder.layers.{index}."
    mixer = (
        [
            Entry(f"{megatron}self_attention.net.{name}", (f"{hf}linear_attn.{name}",))
            for name in (*DELTA_NET, *projections)
        ]
        if settings["linear_attention_freq"][index]
        else attention_entries(settings, index)
    )
    dense = mlp_entries(f"{hf}mlp.", f"{megatron}mlp.")
    return [*norm_entries(index), *mixer, *(_experts(settings, index) if moe_layers(settings)[index] else dense)]


def _experts(settings: Settings, index: int) -> list[Entry]:
    hf, megatron = f"model.layers.{index}.mlp.", f"decoder.layers.{index}.mlp."
    return [
        *expert_entries({**settings, "moe_shared_expert_intermediate_size": None}, hf, megatron),
        *mlp_entries(f"{hf}shared_expert.", f"{megatron}shared_experts."),
        Entry(f"{megatron}shared_experts.gate_weight", (f"{hf}shared_expert_gate.weight",)),
    ]


FAMILY = Family("qwen3_next", ("qwen3_next",), settings, layer, not_divided=NOT_DIVIDED)
