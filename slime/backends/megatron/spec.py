"""The one layer specification: megatron-core's own parallel layers, and slime's norm, attention, MLP and experts."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from slime.backends.megatron.modules import (
    GatedMLP,
    GatedSharedExperts,
    GroupedExperts,
    NormedResidual,
    PackedCoreAttention,
    RMSNorm,
    plain_residual,
)
from slime.weights.maps.family import Settings, moe_layers

_CAUSAL = {"attn_mask_type": AttnMaskType.causal}


def block_spec(config: TransformerConfig, settings: Settings, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this pipeline rank (and model chunk), and the norm behind the last of all."""
    with_experts = moe_layers(settings)
    first = get_transformer_layer_offset(config, vp_stage)
    here = range(first, first + get_num_layers_to_build(config, vp_stage))
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(config, settings, with_experts[index]) for index in here], layer_norm=RMSNorm
    )


def layer_spec(config: TransformerConfig, settings: Settings, with_experts: bool) -> ModuleSpec:
    """One decoder layer."""
    normed = ModuleSpec(module=NormedResidual, params={"config": config})
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_latent_attention() if config.multi_latent_attention else _attention(config),
            self_attn_bda=normed if settings.get("post_self_attn_layernorm") else plain_residual,
            pre_mlp_layernorm=RMSNorm,
            mlp=_experts() if with_experts else ModuleSpec(module=GatedMLP, submodules=_mlp()),
            mlp_bda=normed if settings.get("post_mlp_layernorm") else plain_residual,
        ),
    )


def _attention(config: TransformerConfig) -> ModuleSpec:
    norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params=_CAUSAL,
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _latent_attention() -> ModuleSpec:
    return ModuleSpec(
        module=MLASelfAttention,
        params=_CAUSAL,
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=PackedCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
        ),
    )


def _mlp() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def _experts() -> ModuleSpec:
    shared = ModuleSpec(module=GatedSharedExperts, submodules=_mlp())
    submodules = MoESubmodules(experts=ModuleSpec(module=GroupedExperts), shared_experts=shared)
    return ModuleSpec(module=MoELayer, submodules=submodules, metainfo={"fuse_pre_mlp_layernorm": False})
