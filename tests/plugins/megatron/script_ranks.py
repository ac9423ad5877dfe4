"""Build the model of every script in ``scripts/models``, with few layers and without memory."""

from __future__ import annotations

import os
import subprocess
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

CHECKOUT = Path(__file__).resolve().parents[3]
FAMILY = {
    "deepseek-v3.2": "deepseek_v32",
    "glm5": "glm_moe_dsa",
    "deepseek": "deepseek_v3",
    "moonlight": "deepseek_v3",
    "kimi": "deepseek_v3",
    "smollm2": "llama",
    "llama3": "llama",
    "qwen2.5": "qwen2",
    "qwen3.5": "qwen3_5",
    "qwen3-next": "qwen3_next",
    "minimax-m2": "minimax_m2",
    "glm4.7-30B": "glm4_moe_lite",
    "glm4-": "glm4",
    "glm4.": "glm4_moe",
}
"""How a script's name begins → the family."""
LATENT = ("deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa")


def scripts() -> list[Path]:
    return sorted(CHECKOUT.glob("scripts/models/*.sh"))


def family_name(script: Path) -> str:
    named = (name for start, name in FAMILY.items() if script.stem.startswith(start))
    return next(named, "qwen3_moe" if "-A" in script.stem else "qwen3")


def flags_of(script: Path) -> dict[str, Any]:
    """MODEL_ARGS as the parser reads them, by Megatron's names."""
    from slime.config.parser import read_command_line

    command = f'set -eu; source "{script}"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    words = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    args, problems = read_command_line(words.split())
    assert problems == [], problems
    return dict(args.megatron)


def hf_config(family: str, flags: dict[str, Any]) -> Any:
    """transformers' config of the model that the flags describe."""
    from transformers import AutoConfig

    from slime.plugins.megatron.maps.family import moe_layers

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": flags["rotary_base"]}
    if flags.get("rotary_percent"):
        rope["partial_rotary_factor"] = flags["rotary_percent"]
    if flags.get("use_rope_scaling"):
        fixed = dict(
            low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        )
        rope |= {"rope_type": "llama3", "factor": flags["rope_scaling_factor"], **fixed}
    fields: dict[str, Any] = dict(
        vocab_size=flags["vocab_size"],
        hidden_size=flags["hidden_size"],
        intermediate_size=flags["ffn_hidden_size"],
        num_hidden_layers=flags["num_layers"],
        num_attention_heads=flags["num_attention_heads"],
        num_key_value_heads=flags.get("num_query_groups", flags["num_attention_heads"]),
        rms_norm_eps=flags["norm_epsilon"],
        rope_parameters=rope,
        tie_word_embeddings=not flags.get("untie_embeddings_and_output_weights", False),
    )
    if flags.get("max_position_embeddings"):
        fields["max_position_embeddings"] = flags["max_position_embeddings"]
    if flags.get("kv_channels"):
        fields["head_dim"] = flags["kv_channels"]
    if family in ("glm4", "glm4_moe"):
        fields["attention_bias"] = flags.get("add_qkv_bias", False)
    if flags.get("num_experts"):
        fields |= dict(
            moe_intermediate_size=flags["moe_ffn_hidden_size"],
            num_experts_per_tok=flags["moe_router_topk"],
        )
    if family in ("qwen3_moe", "qwen3_next"):
        fields |= dict(num_experts=flags["num_experts"], norm_topk_prob=True)
    if family == "qwen3_next":
        fields["shared_expert_intermediate_size"] = flags["moe_shared_expert_intermediate_size"]
    if family == "minimax_m2":
        fields["num_local_experts"] = flags["num_experts"]
    if family in LATENT:
        if flags.get("rotary_scaling_factor", 1) > 1:
            rope |= dict(
                rope_type="yarn",
                factor=flags["rotary_scaling_factor"],
                original_max_position_embeddings=4096,
            )
            rope |= dict(mscale=flags["mscale"], mscale_all_dim=flags["mscale_all_dim"])
        fields |= dict(
            q_lora_rank=flags.get("q_lora_rank"),
            kv_lora_rank=flags["kv_lora_rank"],
            qk_nope_head_dim=flags["qk_head_dim"],
            qk_rope_head_dim=flags["qk_pos_emb_head_dim"],
            v_head_dim=flags["v_head_dim"],
            n_group=flags.get("moe_router_num_groups", 1),
            topk_group=flags.get("moe_router_group_topk", 1),
        )
    if family == "qwen3_5":
        experts = flags.get("num_experts")
        if experts:
            shared = flags["moe_shared_expert_intermediate_size"]
            fields |= dict(num_experts=experts, shared_expert_intermediate_size=shared)
        return AutoConfig.for_model("qwen3_5_moe_text" if experts else "qwen3_5_text", **fields)
    if family == "glm4_moe" or family in LATENT:
        fields |= dict(
            n_routed_experts=flags["num_experts"],
            n_shared_experts=flags["moe_shared_expert_intermediate_size"]
            // flags["moe_ffn_hidden_size"],
            routed_scaling_factor=flags.get("moe_router_topk_scaling_factor", 1.0),
            first_k_dense_replace=moe_layers(flags).count(False),
        )
    if family == "glm4_moe":
        fields["use_qk_norm"] = flags.get("qk_layernorm", False)
    return AutoConfig.for_model(family, **fields)


def reduced_config(script: Path) -> Any:
    """The model of a script with one layer of each kind."""
    config = hf_config(family_name(script), flags_of(script))
    config.num_hidden_layers = getattr(config, "first_k_dense_replace", 1) + 1
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = ["dense"] * (config.num_hidden_layers - 1) + ["sparse"]
    if getattr(config, "index_topk", None):
        config.layer_types = ["indexed_attention"] * config.num_hidden_layers
        config.indexer_types = ["full"] * config.num_hidden_layers
    if getattr(config, "linear_num_key_heads", None):
        config.layer_types = ["linear_attention", "full_attention"]
    return config


def megatron_shapes(script: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the Hugging Face tensors that the map makes of Megatron's parameters.

    Raises:
        MegatronError: a flag of the script is not what transformers' config means.
    """
    import torch

    from slime.config.args import Args
    from slime.config.layout import ParallelLayout
    from slime.config.resolve import resolve_defaults
    from slime.config.rules import Run
    from slime.plugins.megatron.config import merged_settings, transformer_config
    from slime.plugins.megatron.maps.family import get_family
    from slime.plugins.megatron.mixers import Indexers, delta_nets
    from slime.plugins.megatron.model import build_chunk
    from slime.plugins.megatron.weights import ModelWeights

    family = get_family(family_name(script))
    flags = flags_of(script)
    args = Args(train_backend="megatron", train_dtype="bfloat16", megatron=flags)
    resolve_defaults(Run(args))
    merged_settings(args.megatron, args.hf_checkpoint, family, hf_config(family.name, flags))
    reduced = reduced_config(script)
    settings = family.settings(reduced.to_dict())
    on_meta = mock.patch("slime.plugins.megatron.model.device_of", lambda config: "meta")
    with torch.device("meta"), on_meta:
        nets = delta_nets(reduced, family, settings)
        types = settings.get("indexer_types")
        indexers = Indexers(reduced, types) if types else None
        config = transformer_config(args, settings, ParallelLayout(), torch.device("cpu"))
        weights = ModelWeights(
            [build_chunk(config, settings, False, None, 0, None, None, nets, indexers)],
            family,
            settings,
            False,
        )
        return {name: tuple(tensor.shape) for name, tensor in weights.gather()}


def worker(rank: int, ports: Any, output: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from slime.config.layout import ParallelLayout
    from slime.plugins.megatron import groups

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{ports.get(1)}", rank=0, world_size=1
    )
    groups.initialize(ParallelLayout(), 0, 10)
    results = {}
    for script in scripts():
        try:
            results[script.stem] = megatron_shapes(script)
        except Exception:
            results[script.stem] = {"error": traceback.format_exc()}
    torch.save(results, output)
