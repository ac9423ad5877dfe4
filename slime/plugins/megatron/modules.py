"""Modules that megatron-core provides only with Transformer Engine: norm, attention over packs,
and an MLP that saves few tensors for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from slime.models.fused import fused_on_cuda
from slime.models.masked_attention import ScoreChanges
from slime.models.packed_attention import attend
from slime.models.segments import PackSegments

_Result = TypeVar("_Result")
Offsets = tuple[tuple[int, int, int], ...]
"""(axis, index of the part, number of parts) for each axis along which a tensor is divided outside
of its module.
"""


@dataclass
class Pack(PackedSeqParams):
    """The layout of a micro-batch, which Megatron passes to every layer. ``qkv_format`` stays None,
    so that Megatron does not change the layout ``[T, 1, ...]``."""

    positions: Tensor | None = None
    """int64 ``[T]``: the position of each token of this rank in its sample."""
    cos_sin: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of the rotary embedding, each ``[T, 1, rotary dims]``, computed once for
    all layers.
    """
    window_cos_sin: tuple[Tensor, Tensor] | None = None
    """The same for layers with a sliding window, if they have frequencies of their own."""
    segments: PackSegments | None = None
    index_cos_sin: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of indexers, each ``[1, T, rotary dims]``."""
    selected: dict[int, Tensor] = field(default_factory=dict)
    """What the indexers of layers have selected whose selection later layers share, int32 ``[T,
    index_topk]``, by the number of the layer from 0."""


@fused_on_cuda
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize ``x``, ``[..., H]``, over its last dimension, and multiply by ``weight``,
    ``[H]``.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


@fused_on_cuda
def rms_norm_1p(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize ``x``, ``[..., H]``, over its last dimension in float32, and multiply by ``1 +
    weight``, ``[H]``.
    """
    return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) · weight, or · (1 + weight) with ``layernorm_zero_centered_gamma``. With sequence
    parallelism each rank has part of the tokens, so gradients are summed."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.norm = rms_norm_1p if config.layernorm_zero_centered_gamma else rms_norm
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device_of(config))
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.eps)


class LatentRMSNorm(RMSNorm):
    """The norm of a low-rank projection in latent attention. transformers does not use the epsilon
    of config.json.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object
    ) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


class DividedRows(nn.Module):
    """A module with one tensor, ``weight``, which is divided among tensor-parallel ranks along its
    first axis.
    """

    tp_group: ProcessGroup

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Offsets = (),
        metadata: dict[str, ProcessGroup] | None = None,
    ) -> dict[str, ShardedTensor]:
        """Return the weight as a part of that of all ranks."""
        tensors = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {})["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(
            tensors, prefix, {"weight": 0}, sharded_offsets, **groups
        )


class HeadsRMSNorm(DividedRows):
    """RMSNorm over all heads of a token together, of which each tensor-parallel rank has a part
    (MiniMax-M2).
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        heads: int,
        eps: float = 1e-6,
        **_: object,
    ) -> None:
        """Create the norm of ``heads`` heads of ``hidden_size`` features."""
        super().__init__()
        self.eps = eps
        self.features = heads * hidden_size
        self.tp_group = get_tensor_model_parallel_group()
        make = {"dtype": config.params_dtype, "device": device_of(config)}
        self.weight = nn.Parameter(torch.ones(self.features // self.tp_group.size(), **make))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``, ``[T, 1, heads of this rank, d]``."""
        wide = x.flatten(2).float()
        squares = reduce_from_tensor_model_parallel_region(
            wide.square().sum(-1, keepdim=True), group=self.tp_group
        )
        # Every rank's output depends on the sum, so its gradient is summed too.
        squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        normed = wide * torch.rsqrt(squares / self.features + self.eps)
        return (self.weight * normed.to(x.dtype)).view_as(x)


def gather_or_copy(x: Tensor, sequence_parallel: bool, group: ProcessGroup) -> Tensor:
    """Return the rows of all tensor-parallel ranks, given this rank's rows (with
    ``sequence_parallel``) or all of them.

    Each rank computes a part of the result from them, so their gradients are summed over the ranks.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=True, group=group
        )
    return copy_to_tensor_model_parallel_region(x, group=group)


def scatter_or_reduce(x: Tensor, sequence_parallel: bool, group: ProcessGroup) -> Tensor:
    """Sum the ranks' parts of a result, and return this rank's rows of it (with
    ``sequence_parallel``) or all rows.
    """
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(x, group=group)
    return reduce_from_tensor_model_parallel_region(x, group=group)


def device_of(config: TransformerConfig) -> torch.device | str | int:
    """Return the device on which parameters are created."""
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


def plain_residual(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Replace Megatron's bias-dropout-add, which saves a mask of ones for the backward pass even
    without dropout.
    """

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        x, bias = x_with_bias
        return residual + (x if bias is None else x + bias)

    return add


class NormedResidual(nn.Module):
    """Replaces Megatron's bias-dropout-add, with a norm on the branch before it is added to the
    residual (GLM-4).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        def add(
            x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
        ) -> Tensor:
            x, bias = x_with_bias
            return residual + self.norm(x if bias is None else x + bias)

        return add


class ScaledResidual(nn.Module):
    """Replaces Megatron's bias-dropout-add, with a factor on the branch that is added to the
    residual (Granite).
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        def add(
            x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
        ) -> Tensor:
            x, bias = x_with_bias
            return residual + (x if bias is None else x + bias) * self.scale

        return add


class PackedCoreAttention(MegatronModule):
    """Causal attention inside each sample of a pack, with or without context parallelism.

    The config may have a window for some layers (``window_size``, ``window_attn_skip_freq``), and
    attention sinks (``softmax_type`` "learnable"), which are then the parameter ``softmax_offset
    [heads of this rank]``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = config.window_size[0] if windowed else -1
        skipped = config.no_rope_freq
        self.turns = not config.multi_latent_attention and not (
            skipped and skipped[layer_number - 1]
        )
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            make = {"dtype": config.params_dtype, "device": device_of(config)}
            self.softmax_offset = nn.Parameter(torch.empty(heads, **make))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Pack | None = None,
        x: Tensor | None = None,
        qr: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """Return the attention of a pack, ``[T, 1, H · d_v]``. ``query`` is ``[T, 1, H, d]`` or
        ``[T, H, d]``. ``key`` and ``value`` have the same layout, but may have fewer heads. ``x`` and
        ``qr`` are for :meth:`select`."""
        assert packed_seq_params is not None and packed_seq_params.segments is not None, (
            "packs only"
        )
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        cos_sin = packed_seq_params.cos_sin
        if self.window >= 0 and packed_seq_params.window_cos_sin is not None:
            cos_sin = packed_seq_params.window_cos_sin
        if self.turns and cos_sin is not None:
            q, k = turn_heads(q, k, *cos_sin, self.config.rotary_interleaved)
        scale = q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        out = attend(
            q,
            k,
            v,
            packed_seq_params.segments,
            scale,
            self.window,
            ScoreChanges(self.softmax_offset),
            self.select(packed_seq_params, x, qr),
        )
        return out.reshape(out.shape[0], 1, -1)

    def select(self, pack: Pack, x: Tensor | None, qr: Tensor | None) -> Tensor | None:
        """Return the keys that an indexer selects; None for all."""
        return None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        """Return the attention sinks, if any, as a part of those of all heads."""
        tensors = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            tensors, prefix, {"softmax_offset": 0}, sharded_offsets
        )


class GatedAttention(SelfAttention):
    """Megatron's attention, with the right output gate if several tensor-parallel ranks share a
    key-value head.

    megatron-core 0.16 divides the queries of this head among the ranks, but not their gates.
    """

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return query, key and value, ``[T, 1, heads, d]``, and the gate of the query if it is
        requested.
        """
        found: tuple[Tensor, ...] = super().get_query_key_value_tensors(*args, **kwargs)
        sharing = self.world_size // self.config.num_query_groups
        if len(found) < 4 or sharing <= 1:
            return found
        query, key, value, gate = found
        part = get_tensor_model_parallel_rank() % sharing
        return query, key, value, gate.chunk(sharing, 2)[part]


@fused_on_cuda
def turn_heads(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Apply the rotary embedding (RoPE).

    Args:
        q, k: ``[T, H, d]`` and ``[T, H_kv, d]``. Only the first ``r`` features are rotated.
        cos, sin: ``[T, 1, r]``, in which each angle occurs twice.
        interleaved: Whether neighboring features form a pair. Otherwise feature i forms a pair with
            feature i + r/2.
    """
    return _turned(q, cos, sin, interleaved), _turned(k, cos, sin, interleaved)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    whole = x
    x = x[..., : cos.shape[-1]]
    if interleaved:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        # Checkpoints of Hugging Face pair feature i with feature i + r/2, those of DeepSeek
        # neighboring features.
        first, second = x.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    turned = x * cos + other * sin
    return turned if x.shape == whole.shape else torch.cat((turned, whole[..., x.shape[-1] :]), -1)


class ReplicatedLinear(nn.Module):
    """A low-rank projection of latent attention, which every tensor-parallel rank has in full.

    Megatron divides it into columns, and the gradient of the rotary part of the keys then lacks
    other ranks' heads.
    """

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        make = {"dtype": config.params_dtype, "device": device_of(config)}
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **make))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Project this rank's part of the sequence, ``[T, 1, inputs]``, to ``[T, 1, outputs]``."""
        return F.linear(x, self.weight), None


def without_keeping(
    linear: Callable[[Tensor], _Result], make: Callable[[Tensor], Tensor], source: Tensor
) -> _Result:
    """Compute ``linear(make(source))``. The backward pass computes ``make(source)`` again instead
    of saving it.
    """
    inner = make(source)
    place = inner.data_ptr()
    size = inner.numel()

    # autograd calls `pack` with every tensor that the product saves, including its weight. The
    # result of `make` is recognized by its address, and only this tensor is replaced by its shape,
    # so that backward computes it again.
    def pack(x: Tensor) -> Tensor | torch.Size:
        return x.shape if x.data_ptr() == place and x.numel() == size else x

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return make(source).view(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return linear(inner)


class GatedMLP(MLP):
    """Megatron's MLP, which does not save the product of gate and up for the backward pass."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: object
    ) -> Any:
        """Return the output, ``[T, 1, H]`` like the input, and the bias that the caller has to
        add.
        """
        plain = per_token_scale is None and self.config.activation_func_clamp_value is None
        if not plain or self.config.glu_linear_offset:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        gate_up, bias = self.linear_fc1(hidden_states)
        gated = swiglu if self.config.activation_func is F.silu else geglu
        return without_keeping(self.linear_fc2, gated, gate_up if bias is None else gate_up + bias)


class GatedSharedExperts(SharedExpertMLP, GatedMLP):
    """The experts that process every token. They save the same tensors as :class:`GatedMLP`."""


@fused_on_cuda
def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) · up``, ``[..., f]``, of the halves of ``gate_up``, ``[..., 2 f]``."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@fused_on_cuda
def geglu(gate_up: Tensor) -> Tensor:
    """Return ``gelu(gate) · up``, ``[..., f]``, as :func:`swiglu`, with tanh's approximation of
    GELU (Gemma).
    """
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up
