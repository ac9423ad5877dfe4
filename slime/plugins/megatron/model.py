"""Megatron's GPT model for RL: it computes per-token log-probs (actor) or values (critic) of a
pack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from slime.backends.loss_inputs import Scores
from slime.models.scorer import value_head_weight
from slime.models.token_log_probs import default_chunk_size, token_log_probs
from slime.plugins.megatron.core import MegatronError
from slime.plugins.megatron.experts import GroupedExperts, replace_dispatcher
from slime.plugins.megatron.maps.family import Settings, moe_layers, padded_vocab_size
from slime.plugins.megatron.mixers import DeltaNets, Indexers, PackedDeltaNet, SparseCoreAttention
from slime.plugins.megatron.modules import (
    DividedRows,
    GatedAttention,
    GatedMLP,
    GatedSharedExperts,
    HeadsRMSNorm,
    LatentRMSNorm,
    NormedResidual,
    PackedCoreAttention,
    ReplicatedLinear,
    RMSNorm,
    ScaledResidual,
    device_of,
    gather_or_copy,
    plain_residual,
)
from slime.plugins.megatron.rotary import LatentRotary, PackedRotary
from slime.plugins.megatron.vocab_parallel import VocabShard, vocab_parallel_log_probs

EMPTY = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class Scoring:
    """What the last pipeline stage computes from the hidden states of a pack."""

    logit_index: Tensor = EMPTY
    """int64 ``[R]``: the rows, among the ``T`` tokens of this rank, that predict a response
    token.
    """
    targets: Tensor = EMPTY
    """int64 ``[R]``: the token that each of these rows predicts."""
    temperature: float = 1.0
    with_entropy: bool = False
    entropy_grad: bool = False
    with_logits: bool = False
    chunk_size: int = -1
    fused: bool = False
    """Whether to compile the operations on logits. This is meant for accelerators."""


class PolicyModel(GPTModel):
    """A GPT model whose last stage returns :class:`Scores`. Logits are computed for scored rows
    only, in chunks.
    """

    def _postprocess(
        self, hidden_states: Tensor, *args: object, labels: Scoring, **kwargs: object
    ) -> Tensor | Scores:
        """Compute the output of a stage. Megatron passes ``labels`` through the whole model to this
        method, so slime uses this argument for the :class:`Scoring`."""
        if not self.post_process:
            return hidden_states
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else None
        )
        return self.output_layer(hidden_states, labels, weight)


Chunk: TypeAlias = PolicyModel | DistributedDataParallel
"""The part of the model on a pipeline rank, or one of its chunks, with or without Megatron's
gradient buffers.
"""


def unwrapped(chunk: Chunk) -> PolicyModel:
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


class PolicyHead(DividedRows):
    """The output embedding, divided among tensor-parallel ranks. It takes the weight of Megatron's
    own output layer and is saved as that layer is."""

    weight: nn.Parameter | None
    """None if the weight is that of the input embedding on the same stage."""

    def __init__(self, layer: ColumnParallelLinear, vocab_size: int, scale: float = 1.0) -> None:
        """Create the head. ``scale`` is a factor on the logits."""
        super().__init__()
        self.scale = scale
        self.tp_group = layer.tp_group
        self.sequence_parallel = layer.sequence_parallel
        self.vocab_size = vocab_size
        # Megatron pads the vocabulary to a multiple of the number of ranks. The padding is on the
        # last ranks and must not enter the softmax.
        rows = layer.output_size_per_partition
        self.start = rows * self.tp_group.rank()
        self.rows = min(rows, vocab_size - self.start)
        if self.rows < 1:
            raise MegatronError(
                f"tensor-parallel rank {self.tp_group.rank()} would hold only padding of the "
                "vocabulary. Lower --make-vocab-size-divisible-by (the vocabulary size is "
                f"{vocab_size})"
            )
        self.register_parameter("weight", layer.weight)

    def forward(self, hidden: Tensor, scoring: Scoring, weight: Tensor | None) -> Scores:
        """Return float32 scores ``[R]`` of the response tokens, and logits ``[R, V]`` if they are
        requested.

        Args:
            hidden: ``[T, 1, H]``, or this rank's part of the rows with sequence parallelism.
            weight: The input embedding ``[rows of this rank, H]`` if it is tied; otherwise None.
        """
        # A tied embedding is passed as an argument, because the parameter belongs to another module
        # of this stage.
        padded = self.weight if weight is None else weight
        assert padded is not None
        weight = padded[: self.rows]
        rows = self._rows(hidden, scoring)
        options: dict[str, Any] = dict(
            with_entropy=scoring.with_entropy, entropy_grad=scoring.entropy_grad
        )
        if self.tp_group.size() == 1:
            options |= dict(chunk_size=scoring.chunk_size, fused=scoring.fused)
            scores = token_log_probs(rows, weight, scoring.targets, scoring.temperature, **options)
        else:
            shard = VocabShard(self.start, self.tp_group)
            options["chunk_size"] = (
                scoring.chunk_size if scoring.chunk_size > 0 else default_chunk_size(len(padded))
            )
            scores = vocab_parallel_log_probs(
                rows, weight, scoring.targets, shard, scoring.temperature, **options
            )
        logits = self._logits(rows, padded) / scoring.temperature if scoring.with_logits else None
        return Scores(scores.log_probs, scores.entropy, logits)

    def _rows(self, hidden: Tensor, scoring: Scoring) -> Tensor:
        """Return the scored rows ``[R, H]``. Their gradients are summed over tensor-parallel ranks,
        because each rank computes only the part of the gradient that belongs to its rows of the
        vocabulary."""
        whole = gather_or_copy(hidden, self.sequence_parallel, self.tp_group)
        rows = whole.flatten(0, 1).index_select(0, scoring.logit_index)
        return rows if self.scale == 1.0 else rows * self.scale

    def _logits(self, rows: Tensor, padded: Tensor) -> Tensor:
        local = rows @ padded.t()
        return gather_from_tensor_model_parallel_region(local, group=self.tp_group)[
            :, : self.vocab_size
        ].float()


class ValueHead(nn.Module):
    """The head of a critic or a reward model, ``hidden -> 1``. Every tensor-parallel rank computes all of
    it.
    """

    def __init__(self, config: TransformerConfig, seed: int, layer: ColumnParallelLinear) -> None:
        super().__init__()
        self.tp_group = layer.tp_group
        self.sequence_parallel = layer.sequence_parallel
        make = {"dtype": config.params_dtype, "device": device_of(config)}
        self.weight = nn.Parameter(value_head_weight(config.hidden_size, seed).to(**make))
        self.bias = nn.Parameter(torch.zeros(1, **make))

    def forward(self, hidden: Tensor, scoring: Scoring, weight: Tensor | None) -> Scores:
        """Return float32 values ``[R]`` of the response tokens. The arguments are those of
        :class:`PolicyHead`.
        """
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        rows = hidden.flatten(0, 1).index_select(0, scoring.logit_index)
        return Scores(values=nn.functional.linear(rows, self.weight, self.bias).squeeze(-1).float())


def build_chunk(
    config: TransformerConfig,
    settings: Settings,
    valued: bool,
    vp_stage: int | None,
    seed: int,
    rotary: tuple[Tensor, float] | None,
    window_rotary: tuple[Tensor, float] | None,
    delta_nets: DeltaNets | None,
    indexers: Indexers | None,
) -> PolicyModel:
    """Build the part of the model on a pipeline rank, or one of its model chunks.

    The weights are not initialized, except those of a value head.

    Args:
        valued: Whether the model has a value head, as that of a critic or a reward model, instead
            of the output embedding.
        vp_stage: The number of the model chunk on this rank; None without interleaved pipelines.
        seed: The seed of the value head.
        rotary, window_rotary: The results of
            :func:`~slime.plugins.megatron.rotary.scaled_frequencies` and
            :func:`~slime.plugins.megatron.rotary.window_frequencies`.
        delta_nets, indexers: What makes these modules; None if the model has none.
    """
    # Without interleaved pipelines, Megatron must not be asked about model chunks.
    stage: dict[str, Any] = (
        {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    )
    model = PolicyModel(
        config,
        block_spec(config, settings, vp_stage, delta_nets, indexers),
        vocab_size=padded_vocab_size(settings),
        max_sequence_length=settings.get("max_position_embeddings") or 1,
        pre_process=mpu.is_pipeline_first_stage(**stage),
        post_process=mpu.is_pipeline_last_stage(**stage),
        position_embedding_type="none" if config.multi_latent_attention else "rope",
        rotary_percent=settings.get("rotary_percent") or 1.0,
        rotary_base=settings.get("rotary_base") or 10000,
        rope_scaling=bool(settings.get("use_rope_scaling")),
        rope_scaling_factor=settings.get("rope_scaling_factor") or 8.0,
        share_embeddings_and_output_weights=not valued
        and not settings["untie_embeddings_and_output_weights"],
        vp_stage=vp_stage,
    )
    # What Megatron computes for padded batches is replaced by modules that compute packs.
    if hasattr(model, "rotary_pos_emb"):
        model.rotary_pos_emb = PackedRotary(model.rotary_pos_emb, rotary, window_rotary)
    if model.pre_process and settings.get("embedding_scale"):
        model.embedding.register_forward_hook(Scale(settings["embedding_scale"]))
    _adapt(model, config)
    # The last stage scores or values response tokens, instead of returning all logits.
    if model.post_process:
        layer = model.output_layer
        if valued:
            model.output_layer = ValueHead(config, seed, layer)
        else:
            scale = settings.get("logit_scale") or 1.0
            model.output_layer = PolicyHead(layer, settings["vocab_size"], scale)
    return model


@dataclass(frozen=True)
class Scale:
    """A forward hook that multiplies the output by a factor, rounded to the dtype of the output as
    in transformers.
    """

    factor: float

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * torch.tensor(self.factor, dtype=output.dtype, device=output.device)


def with_gradient(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """A forward hook of a frozen embedding, whose output then requires a gradient as if it were
    trained.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output


def _adapt(model: PolicyModel, config: TransformerConfig) -> None:
    """Replace Megatron's low-rank projections, their rotary embedding and dispatchers of experts by
    those of slime.
    """
    for layer in model.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            replace_dispatcher(layer.mlp, get_default_pg_collection())
            if config.moe_shared_expert_gate:  # Megatron creates it on the CPU
                layer.mlp.shared_experts.gate_weight.data = layer.mlp.shared_experts.gate_weight.to(
                    device_of(config)
                )
    for layer in model.decoder.layers if config.multi_latent_attention else ():
        attention = layer.self_attention
        attention.rotary_pos_emb = LatentRotary(attention.rotary_pos_emb)
        if isinstance(attention.core_attention, SparseCoreAttention):
            attention.checkpoint_core_attention = False  # each of its blocks is computed again
        keys = config.kv_lora_rank + config.qk_pos_emb_head_dim
        attention.linear_kv_down_proj = ReplicatedLinear(config, config.hidden_size, keys)
        if config.q_lora_rank is not None:
            attention.linear_q_down_proj = ReplicatedLinear(
                config, config.hidden_size, config.q_lora_rank
            )


# --- the layer specification: parallel layers of megatron-core; norm, attention, MLP and experts of
# slime ---

_CAUSAL = {"attn_mask_type": AttnMaskType.causal}
_MLP = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def block_spec(
    config: TransformerConfig,
    settings: Settings,
    vp_stage: int | None,
    delta_nets: DeltaNets | None,
    indexers: Indexers | None,
) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline rank (and model chunk), and the norm after the last layer
    of the model.
    """
    with_experts = moe_layers(settings)
    recurrent = settings.get("linear_attention_freq") or [0] * config.num_layers
    first = get_transformer_layer_offset(config, vp_stage)
    here = range(first, first + get_num_layers_to_build(config, vp_stage))
    if indexers is not None:
        indexers.require_stage(here)
    return TransformerBlockSubmodules(
        layer_specs=[
            layer_spec(
                config, settings, with_experts[i], delta_nets if recurrent[i] else None, indexers
            )
            for i in here
        ],
        layer_norm=RMSNorm,
    )


def layer_spec(
    config: TransformerConfig,
    settings: Settings,
    with_experts: bool,
    delta_nets: DeltaNets | None,
    indexers: Indexers | None,
) -> ModuleSpec:
    """Return the specification of a decoder layer. With ``delta_nets``, it has this instead of
    attention.
    """
    if delta_nets is not None:
        attention = ModuleSpec(module=PackedDeltaNet, params={"nets": delta_nets})
    else:
        latent = config.multi_latent_attention
        attention = _latent_attention(indexers) if latent else _attention(settings)
    plain: ModuleSpec | Callable[..., object] = plain_residual
    if settings.get("residual_scale"):
        plain = ModuleSpec(module=ScaledResidual, params={"scale": settings["residual_scale"]})
    normed = ModuleSpec(module=NormedResidual, params={"config": config})
    input_norm = IdentityOp if settings.get("without_input_norms") else RMSNorm
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=input_norm,
            self_attention=attention,
            self_attn_bda=normed if settings.get("post_self_attn_layernorm") else plain,
            pre_mlp_layernorm=input_norm,
            mlp=_experts() if with_experts else ModuleSpec(module=GatedMLP, submodules=_MLP),
            mlp_bda=normed if settings.get("post_mlp_layernorm") else plain,
        ),
    )


def _attention(settings: Settings) -> ModuleSpec:
    norm: type[nn.Module] = IdentityOp
    if settings.get("qk_layernorm"):
        norm = HeadsRMSNorm if settings.get("qk_norm_over_heads") else RMSNorm
    return ModuleSpec(
        module=GatedAttention,
        params=_CAUSAL,
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=ModuleSpec(module=norm, params={"heads": settings["num_attention_heads"]}),
            k_layernorm=ModuleSpec(module=norm, params={"heads": settings["num_query_groups"]}),
        ),
    )


def _latent_attention(indexers: Indexers | None) -> ModuleSpec:
    core: type[nn.Module] | ModuleSpec = PackedCoreAttention
    if indexers is not None:
        core = ModuleSpec(module=SparseCoreAttention, params={"indexers": indexers})
    return ModuleSpec(
        module=MLASelfAttention,
        params=_CAUSAL,
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=core,
            linear_proj=RowParallelLinear,
            q_layernorm=LatentRMSNorm,
            kv_layernorm=LatentRMSNorm,
        ),
    )


def _experts() -> ModuleSpec:
    shared = ModuleSpec(module=GatedSharedExperts, submodules=_MLP)
    submodules = MoESubmodules(experts=ModuleSpec(module=GroupedExperts), shared_experts=shared)
    return ModuleSpec(
        module=MoELayer, submodules=submodules, metainfo={"fuse_pre_mlp_layernorm": False}
    )
