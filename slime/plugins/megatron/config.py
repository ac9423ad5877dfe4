"""Convert flags and config.json to the shape of the model and to the config dataclasses of
megatron-core.

megatron-core is imported only where it is needed, because converters use :func:`merged_settings`
without it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from slime.backends.collectives import DTYPES
from slime.config.layout import ParallelLayout
from slime.config.trainer import ModelConfig
from slime.config.trainer import OptimizerConfig as OptimizerFlags
from slime.plugins.megatron.core import MegatronError
from slime.plugins.megatron.flags import (
    PERFORMANCE,
    READ_BY_SLIME,
    WITHOUT_EFFECT,
    fields_by_dest,
    refused_flags,
)
from slime.plugins.megatron.maps.family import Family, Settings, moe_layers

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from transformers import PretrainedConfig

    from slime.backends.lr_schedule import LrSchedule

NEUTRAL: Settings = {
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "softmax_type": "vanilla",
    "apply_layernorm_1p": False,
    "attention_output_gate": False,
    "use_gated_attention": False,
    "linear_attention_freq": None,
    "moe_shared_expert_gate": False,
    "experimental_attention_variant": None,
    **dict.fromkeys(("window_size", "window_attn_skip_freq", "softmax_scale", "no_rope_freq")),
}
"""The values of flags that a family's settings leave out, so that a flag cannot change the
model.
"""
GELU = functools.partial(F.gelu, approximate="tanh")


def merged_settings(
    flags: Settings, checkpoint: str, family: Family, hf_config: PretrainedConfig
) -> Settings:
    """Return the shape of the model: what config.json specifies, and the user's flags for
    everything else.

    Args:
        flags: The Megatron flags that the user gave, by name.
        checkpoint: The folder of ``hf_config``, for error messages.

    Raises:
        MegatronError: Flags contradict config.json (the message has all differences), or are not
            supported.
    """
    settings = NEUTRAL | family.settings_of(hf_config.to_dict())
    differences = [
        f"--{name.replace('_', '-')} {flag}, but config.json specifies {settings.get(name)}"
        for name, flag in flags.items()
        if name in settings and not _same(name, flag, settings)
    ]
    if differences:
        raise MegatronError(
            f"the flags describe another model than {checkpoint}: "
            + "; ".join(differences)
            + ". Source the model script of this checkpoint, or leave these flags out"
        )
    if problems := refused_flags(flags):
        raise MegatronError("; ".join(problems))
    return {**flags, **settings}


def _same(name: str, flag: object, settings: Settings) -> bool:
    config = settings[name]
    if name in ("moe_router_load_balancing_type", "moe_token_dispatcher_type", "moe_grouped_gemm"):
        return True  # the difference has no effect
    if name == "moe_layer_freq":
        return moe_layers({**settings, name: flag}) == moe_layers(settings)
    if isinstance(flag, (int, float)) and isinstance(config, (int, float)):
        return abs(float(flag) - float(config)) <= 1e-9 * max(abs(float(config)), 1.0)
    return bool(flag == config) or (flag in (None, False) and config in (None, False))


def _fields_from(settings: Settings, cls: type) -> dict[str, Any]:
    """Return the settings that are fields of a config dataclass, by the name of the field."""
    by_dest = fields_by_dest()
    names = {field.name for field in dataclasses.fields(cls)}
    skip = READ_BY_SLIME | WITHOUT_EFFECT | set(PERFORMANCE)
    renamed = {
        by_dest.get(name, name): value for name, value in settings.items() if name not in skip
    }
    return {name: value for name, value in renamed.items() if name in names and value is not None}


_FIXED: dict[str, object] = {
    "gated_linear_unit": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "perform_initialization": False,
    # Losses are shares of the mean of a step, so gradients are summed over micro-batches and
    # ranks, not averaged.
    "calculate_per_token_loss": True,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "bias_dropout_fusion": False,
    "barrier_with_L1_time": False,
    # Megatron's default, allgather, needs packs of equal length
    "moe_token_dispatcher_type": "alltoall",
    "deterministic_mode": False,
}
"""What slime gives every model, whatever the flags are."""


def transformer_config(
    model: ModelConfig, settings: Settings, layout: ParallelLayout, device: torch.device
) -> TransformerConfig:
    """Return the config of the whole model for this parallel layout.

    Raises:
        MegatronError: The model cannot have this layout, or not with these flags.
    """
    from megatron.core.activations import quick_gelu
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    moe = bool(settings.get("num_experts"))
    latent = bool(settings.get("multi_latent_attention"))
    cls = MLATransformerConfig if latent else TransformerConfig
    dtype = DTYPES[model.train_dtype]
    if problems := _layout_problems(settings, layout):
        raise MegatronError("; ".join(problems))
    activation = (
        quick_gelu if settings.get("quick_geglu") else GELU if settings.get("gelu_tanh") else F.silu
    )
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
        # Megatron requires sequence parallelism to train experts with tensor parallelism, and the
        # replicated projections of latent attention need it too.
        "sequence_parallel": layout.tp > 1
        and bool(settings.get("sequence_parallel") or moe or latent),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "activation_func": activation,
        "use_cpu_initialization": device.type == "cpu",
        "variable_seq_lengths": layout.pp > 1,
        "bias_activation_fusion": device.type == "cuda" and not settings.get("gelu_tanh"),
        **_FIXED,
    }
    if layout.vpp > 1:
        # With two stages and the default settings, messages of neighboring stages are mixed up
        # without an error.
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        fields["microbatch_group_size_per_vp_stage"] = layout.vpp_group
    _adapt_fields(fields, settings)
    fields |= _recompute(settings, model.gradient_checkpointing)
    config = cls(**fields)
    # Megatron's own layer, whose interface is used, has no context parallelism, so Megatron would
    # refuse this.
    config.experimental_attention_variant = settings.get("experimental_attention_variant")
    return config


def _adapt_fields(fields: dict[str, Any], settings: Settings) -> None:
    """Change the fields for experts, latent attention and norms over all heads."""
    # Experts: no auxiliary loss, which RL does not use, and no bias updates unless a flag asks for
    # them.
    if settings.get("num_experts"):
        fields |= {
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_bias_update_rate": float(
                settings.get("moe_router_bias_update_rate") or 0.0
            ),
        }
    fields.pop("experimental_attention_variant", None)
    if settings.get("multi_latent_attention"):
        names = ("rope_type", "rotary_base", "rotary_scaling_factor")
        fields |= {name: settings[name] for name in names}
        fields["q_lora_rank"] = settings.get("q_lora_rank")
        fields.pop("kv_channels", None)  # latent attention has head sizes of its own
        # Megatron would treat these norms as those of query and key heads, and sum their gradients
        # twice.
        fields["qk_layernorm"] = False
    if settings.get("qk_norm_over_heads"):
        # Megatron would sum the gradients of these norms over tensor-parallel ranks
        fields["qk_layernorm"] = False


def _layout_problems(settings: Settings, layout: ParallelLayout) -> list[str]:
    """Return why the model cannot have this layout, or not with these flags."""
    problems = []
    if settings.get("num_experts") and settings.get("add_bias_linear") and layout.etp > 1:
        problems.append(
            "megatron-core does not divide experts with biases among ranks: use "
            "--expert-tensor-parallel-size 1"
        )
    groups = settings["num_query_groups"] if settings.get("qk_norm_over_heads") else layout.tp
    if layout.tp > groups:
        problems.append(
            f"--tensor-model-parallel-size {layout.tp}: this family has a norm over all its "
            f"{groups} key heads. With more ranks than heads, several ranks would have the same "
            f"head: use at most {groups}"
        )
    # The gate is read without a call of its module, and Megatron waits for weights when their
    # module is called.
    overlap = settings.get("moe_shared_expert_overlap") and settings.get("overlap_param_gather")
    if settings.get("moe_shared_expert_gate") and overlap:
        problems.append(
            "--moe-shared-expert-overlap and --overlap-param-gather do not go together for "
            "shared experts with a gate: leave one of them out"
        )
    return problems


def _recompute(settings: Settings, checkpointing: bool) -> dict[str, Any]:
    granularity = settings.get("recompute_granularity")
    if granularity is None and settings.get("recompute_activations"):
        granularity = "selective"
    if granularity is None and checkpointing:
        granularity = "full"
    if granularity != "full":
        return {"recompute_granularity": granularity}
    return {
        "recompute_granularity": "full",
        "recompute_method": settings.get("recompute_method") or "uniform",
        "recompute_num_layers": settings.get("recompute_num_layers") or 1,
    }


def ddp_config(flags: Settings) -> DistributedDataParallelConfig:
    """Return the config of data parallelism: gradients in float32 unless ``--grad-reduce-in-bf16``
    is given, and the distributed optimizer unless it is disabled."""
    from megatron.core.distributed import DistributedDataParallelConfig

    fields = _fields_from(flags, DistributedDataParallelConfig)
    fields |= {
        "use_distributed_optimizer": bool(flags.get("use_distributed_optimizer", True)),
        "grad_reduce_in_fp32": not flags.get("grad_reduce_in_bf16", False),
        "check_for_nan_in_grad": False,  # slime checks the norm of all gradients before the step
    }
    return DistributedDataParallelConfig(**fields)


def optimizer_config(
    given: dict[str, Any], flags: OptimizerFlags, dtype: torch.dtype, schedule: LrSchedule
) -> OptimizerConfig:
    """Return the config of AdamW or SGD from Megatron's flags that were given, and from slime's."""
    from megatron.core.optimizer import OptimizerConfig

    fields = _fields_from(given, OptimizerConfig)
    fields |= {
        "optimizer": flags.optimizer,
        "lr": schedule.max_lr,
        "min_lr": schedule.min_lr,
        "weight_decay": flags.weight_decay,
        "adam_beta1": flags.adam_beta1,
        "adam_beta2": flags.adam_beta2,
        "adam_eps": flags.adam_eps,
        "clip_grad": flags.clip_grad,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": bool(given.get("use_distributed_optimizer", True)),
    }
    return OptimizerConfig(**fields)
