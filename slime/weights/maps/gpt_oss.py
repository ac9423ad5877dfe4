"""gpt-oss (20B, 120B): attention sinks, windows in every other layer, experts with biases and clamped SwiGLU."""

from __future__ import annotations

from slime.weights.maps.family import (
    Entry,
    Family,
    HfConfig,
    Settings,
    attention_entries,
    dense_settings,
    moe_settings,
    norm_entries,
)
from slime.weights.maps.layouts import REPLICATED, ROWS, Interleaved, Transposed

QUICK_GELU_ALPHA = 1.702
"""The factor inside the sigmoid of megatron-core's ``quick_gelu``."""


def settings(config: HfConfig) -> Settings:
    """Return the settings.

    Raises:
        ValueError: The config has no biases, or another factor in its activation.
    """
    if config["swiglu_alpha"] != QUICK_GELU_ALPHA or not config["attention_bias"]:
        raise ValueError(
            f"gpt-oss with swiglu_alpha {config['swiglu_alpha']} and attention_bias {config['attention_bias']} has no "
            f"Megatron map, only with {QUICK_GELU_ALPHA} and True: use --train-backend fsdp"
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


def layer(settings: Settings, index: int) -> list[Entry]:
    hf, megatron, count = f"model.layers.{index}.", f"decoder.layers.{index}.", settings["num_experts"]
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
        Entry(f"{megatron}self_attention.core_attention.softmax_offset", (f"{hf}self_attn.sinks",), ROWS),
        *(Entry(f"{megatron}mlp.router.{name}", (f"{hf}mlp.router.{name}",)) for name in ("weight", "bias")),
        *(
            Entry(f"{megatron}mlp.experts.{name}", (f"{hf}mlp.experts.{theirs}",), layout, experts=count)
            for name, (theirs, layout) in experts.items()
        ),
    ]


FAMILY = Family("gpt_oss", ("gpt_oss",), settings, layer)
