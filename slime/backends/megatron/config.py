"""Flags and config.json → megatron-core's config dataclasses."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from slime.backends.megatron.core import MegatronError
from slime.config.layout import ParallelLayout
from slime.config.megatron_names import ALIASES
from slime.weights.maps.family import Family, Settings, parse_layer_frequency

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

READ_BY_SLIME = frozenset(
    [
        "vocab_size",
        "padded_vocab_size",
        "make_vocab_size_divisible_by",
        "max_position_embeddings",
        "seq_length",
        "position_embedding_type",
        "use_rotary_position_embeddings",
        "rotary_base",
        "rotary_percent",
        "rotary_scaling_factor",
        "use_rope_scaling",
        "rope_scaling_factor",
        "rope_type",
        "group_query_attention",
        "untie_embeddings_and_output_weights",
        "add_position_embedding",
        "post_self_attn_layernorm",
        "post_mlp_layernorm",
        "moe_layer_freq",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "virtual_pipeline_model_parallel_size",
        "recompute_activations",
        "start_weight_decay",
        "end_weight_decay",
        "weight_decay_incr_style",
        "accumulate_allreduce_grads_in_fp32",
        "grad_reduce_in_bf16",
        "use_dist_ckpt",
        "use_distributed_optimizer",
        "swiglu",
        "override_opt_param_scheduler",
        "use_checkpoint_opt_param_scheduler",
        "no_save_rng",
        "ckpt_fully_parallel_load",
        "ckpt_fully_parallel_save",
        "spec",
    ]
)
"""Flags that this backend itself acts on, or that say what config.json says."""

WITHOUT_EFFECT = frozenset(
    [
        "apply_rope_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "gradient_accumulation_fusion",
        "moe_permute_fusion",
        "moe_grouped_gemm",
        "attention_softmax_in_fp32",
        "attention_backend",
        "use_flash_attn",
        "moe_use_legacy_grouped_gemm",
        "moe_token_drop_policy",
        "variable_seq_lengths",
        "bf16",
        "log_interval",
        "tokenizer_type",
        "tokenizer_model",
        "exit_on_missing_checkpoint",
        "auto_detect_ckpt_format",
        "dist_ckpt_strictness",
        "seq_length",
        "train_iters",
        "use_cpu_initialization",
        "perform_initialization",
        "check_for_nan_in_grad",
        "calculate_per_token_loss",
        "moe_router_load_balancing_type",
        "cp_comm_type",
        "async_tensor_model_parallel_allreduce",
        "deterministic_mode",
    ]
)
"""Choices of kernels, and what slime decides: the result is the same either way."""

REFUSED: dict[str, str] = {
    "fp16": "use --train-dtype bfloat16",
    **dict.fromkeys(("fp8", "fp4", "fp8_param", "fp4_param"), "it needs Transformer Engine"),
    **dict.fromkeys(("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"), "packs change their shape"),
    **dict.fromkeys(("moe_enable_deepep", "moe_flex_dispatcher_backend"), "it needs DeepEP: use alltoall"),
    "mtp_num_layers": "multi-token prediction is not trained: leave it out",
    "moe_latent_size": "it needs Transformer Engine",
    "squared_relu": "no family with it has a map",
    "quick_geglu": "no family with it has a map",
    "use_kitchen": "it needs NVIDIA's kitchen package",
    "tp_comm_overlap": "it needs Transformer Engine",
    "cpu_offloading": "it needs Transformer Engine: use --optimizer-cpu-offload or recompute",
    "use_megatron_fsdp": "use --train-backend fsdp",
    "use_precision_aware_optimizer": "it needs Transformer Engine's Adam",
    "use_gated_attention": "no family with it has a map",
    "attention_output_gate": "no family with it has a map",
    "experimental_attention_variant": "no family with it has a map",
    "hidden_dropout": "dropout in a policy's update makes its ratios wrong: use 0",
    "attention_dropout": "dropout in a policy's update makes its ratios wrong: use 0",
    "moe_aux_loss_coeff": "the RL loss has no load-balancing term: use 0",
    "moe_z_loss_coeff": "the RL loss has no z-loss term: use 0",
    "moe_input_jitter_eps": "it makes log-probs random: leave it out",
    "moe_expert_capacity_factor": "dropped tokens make log-probs wrong: leave it out",
    "context_parallel_sharding": "zigzag is what there is",
    "multi_latent_attention": "",
}
"""Flags (when they are on) that this backend cannot honour, with the reason."""


def merged_settings(args: Any, family: Family, hf_config: Any) -> Settings:
    """The model's shape: config.json, with the user's flags on top.

    Raises:
        MegatronError: flags contradict config.json (all differences at once), or cannot be honoured.
    """
    settings = family.settings(hf_config.to_dict())
    given = dict(args.megatron)
    differences = [
        f"--{name.replace('_', '-')} {given[name]}, but config.json means {settings.get(name)}"
        for name in given
        if name in settings and not _same(name, given[name], settings[name])
    ]
    if differences:
        raise MegatronError(
            f"flags describe another model than {args.hf_checkpoint}: "
            + "; ".join(differences)
            + ". Source the model script of this checkpoint, or leave these flags out"
        )
    refuse_unsupported(given)
    return {**given, **settings}


def refuse_unsupported(given: Settings) -> None:
    """Raise MegatronError for flags that would otherwise be ignored."""
    problems = [
        f"--{name.replace('_', '-')} {given[name]}: {why}"
        for name, why in REFUSED.items()
        if why and given.get(name) not in (None, False, 0, 0.0, "none")
    ]
    known = READ_BY_SLIME | WITHOUT_EFFECT | set(REFUSED) | set(_config_fields()) | set(_fields_by_dest())
    problems += [
        f"--{name.replace('_', '-')}: the Megatron backend does not read it" for name in given if name not in known
    ]
    if problems:
        raise MegatronError("Megatron flags that cannot be honoured: " + "; ".join(problems))


def _same(name: str, flag: Any, config: Any) -> bool:
    if name == "moe_layer_freq":
        flag = parse_layer_frequency(flag) if isinstance(flag, str) else flag
    if name in ("moe_router_load_balancing_type", "moe_token_dispatcher_type", "moe_grouped_gemm"):
        return True
    if name == "num_query_groups" and flag is None:
        return True
    if isinstance(flag, (int, float)) and isinstance(config, (int, float)):
        return abs(float(flag) - float(config)) <= 1e-9 * max(abs(float(config)), 1.0)
    return bool(flag == config) or (flag in (None, False) and config in (None, False))


def _fields_by_dest() -> dict[str, str]:
    """Megatron-LM's attribute → megatron-core's field, where they differ."""
    return {alias.dest: alias.field for alias in ALIASES if alias.field}


def _config_fields() -> dict[str, type]:
    """Every field of the config dataclasses that this backend fills from flags."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    classes = (OptimizerConfig, DistributedDataParallelConfig, MLATransformerConfig)
    return {field.name: cls for cls in classes for field in dataclasses.fields(cls)}


def _fields_from(settings: Settings, cls: Any) -> dict[str, Any]:
    """What of the settings are fields of a config dataclass, under the field's name."""
    by_dest = _fields_by_dest()
    names = {field.name for field in dataclasses.fields(cls)}
    skip = READ_BY_SLIME | WITHOUT_EFFECT
    renamed = {by_dest.get(name, name): value for name, value in settings.items() if name not in skip}
    return {name: value for name, value in renamed.items() if name in names and value is not None}


def transformer_config(
    args: Any, settings: Settings, layout: ParallelLayout, device: torch.device
) -> TransformerConfig:
    """Of the whole model, on this layout."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    cls = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    dtype = DTYPES[args.train_dtype]
    moe = bool(settings.get("num_experts"))
    fields = _fields_from(settings, cls)
    for name in ("tensor", "pipeline"):
        fields.pop(f"{name}_model_parallel_size", None)
    fields |= {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        # Megatron refuses to train experts on tensor parallel ranks that do not share the sequence.
        "sequence_parallel": layout.tp > 1 and bool(settings.get("sequence_parallel") or moe),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,
        "variable_seq_lengths": layout.pp > 1,
        # Losses are shares of the step's mean: gradients are summed over micro-batches and ranks, never averaged.
        "calculate_per_token_loss": True,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "bias_activation_fusion": device.type == "cuda",
        "bias_dropout_fusion": False,
        "barrier_with_L1_time": False,
        "moe_token_dispatcher_type": "alltoall",  # allgather, Megatron's default, wants packs of equal length
        "deterministic_mode": False,
    }
    if layout.vpp > 1:
        # With two stages and the default settings neighbours' messages are mixed up, silently.
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        fields["microbatch_group_size_per_vp_stage"] = layout.vpp_group
    if moe:
        fields |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
        fields["moe_enable_routing_replay"] = bool(args.use_routing_replay)
        fields.pop("moe_router_bias_update_rate", None)
        fields["moe_router_bias_update_rate"] = float(settings.get("moe_router_bias_update_rate") or 0.0)
    fields |= _recompute(args, settings)
    return cls(**fields)


def _recompute(args: Any, settings: Settings) -> dict[str, Any]:
    granularity = settings.get("recompute_granularity")
    if granularity is None and settings.get("recompute_activations"):
        granularity = "selective"
    if granularity is None and args.gradient_checkpointing:
        granularity = "full"
    if granularity != "full":
        return {"recompute_granularity": granularity}
    return {
        "recompute_granularity": "full",
        "recompute_method": settings.get("recompute_method") or "uniform",
        "recompute_num_layers": settings.get("recompute_num_layers") or 1,
    }


def ddp_config(args: Any) -> DistributedDataParallelConfig:
    """Gradients in float32 unless ``--grad-reduce-in-bf16``; the distributed optimizer unless switched off."""
    from megatron.core.distributed import DistributedDataParallelConfig

    given = args.megatron
    fields = _fields_from(given, DistributedDataParallelConfig)
    fields |= {
        "use_distributed_optimizer": bool(given.get("use_distributed_optimizer", True)),
        "grad_reduce_in_fp32": not given.get("grad_reduce_in_bf16", False),
        "check_for_nan_in_grad": False,  # the norm of all gradients is looked at before the step
    }
    if fields.get("average_in_collective"):
        raise MegatronError("--ddp-average-in-collective: gradients are summed here, leave it out")
    return DistributedDataParallelConfig(**fields)


def optimizer_config(args: Any, lr: float, min_lr: float) -> OptimizerConfig:
    """AdamW, or SGD, with slime's own flags."""
    from megatron.core.optimizer import OptimizerConfig

    given = args.megatron
    dtype = DTYPES[args.train_dtype]
    fields = _fields_from(given, OptimizerConfig)
    fields |= {
        "optimizer": args.optimizer,
        "lr": lr,
        "min_lr": min_lr,
        "weight_decay": args.weight_decay,
        "adam_beta1": args.adam_beta1,
        "adam_beta2": args.adam_beta2,
        "adam_eps": args.adam_eps,
        "clip_grad": args.clip_grad,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": bool(given.get("use_distributed_optimizer", True)),
    }
    return OptimizerConfig(**fields)
