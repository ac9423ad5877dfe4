"""Building blocks that megatron-core has only with Transformer Engine: norm, attention over packs, rotary positions,
experts in one product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from slime.models.packed_attention import attend
from slime.models.segments import PackSegments


@dataclass
class Pack(PackedSeqParams):
    """A micro-batch's layout, handed down to every layer. ``qkv_format`` stays None: Megatron then leaves the
    ``[T, 1, ...]`` layout alone, and rotary positions come per token."""

    positions: Tensor | None = None
    """int64 ``[T]``: position of each of this rank's tokens in its own sample."""
    segments: PackSegments | None = None


class RMSNorm(nn.Module):
    """x / rms(x) · weight. With sequence parallelism each rank sees part of the tokens, so gradients are summed."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (hidden_size,)
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device_of(config)))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


def device_of(config: Any) -> torch.device | str | int:
    """Where parameters are made."""
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


class NormedResidual(nn.Module):
    """In the place of Megatron's bias-dropout-add: a norm on the branch before it joins the residual (GLM-4)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            x, bias = x_with_bias
            return residual + self.norm(x if bias is None else x + bias)

        return add


class PackedCoreAttention(MegatronModule):
    """Causal attention inside each sample of a pack, with or without context parallelism."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Pack | None = None,
        **_: Any,
    ) -> Tensor:
        """query ``[T, 1, H, d]`` or ``[T, H, d]``, key and value with their own heads → ``[T, 1, H · d_v]``."""
        assert packed_seq_params is not None and packed_seq_params.segments is not None, "packs only"
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        scale = q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        out = attend(q, k, v, packed_seq_params.segments, scale)
        return out.reshape(out.shape[0], 1, -1)


class ReplicatedLinear(nn.Module):
    """A projection that every tensor parallel rank has whole: the low-rank ones of latent attention.

    Megatron's own, cut into columns, loses the other ranks' heads in the gradient of the rotary part of the keys.
    """

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        make = {"dtype": config.params_dtype, "device": device_of(config)}
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **make))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Of this rank's part of the sequence."""
        return F.linear(x, self.weight), None


class PackedRotary(nn.Module):
    """Rotary angles per token of a pack, with the frequencies of one of megatron-core's embeddings.

    Megatron asks first for a length, then for the angles of that length; here the "length" is the positions.
    """

    frequencies: Tensor

    def __init__(self, source: Any, mla: bool = False) -> None:
        super().__init__()
        self.interleaved, self.mla = source.rotary_interleaved, mla
        self.scale: float | None = None
        frequencies = source.inv_freq
        if hasattr(source, "inv_freq_extra"):  # YaRN: the angles of position 1 are its frequencies
            angles, scale = source.get_emb(2)
            frequencies, self.scale = angles[1].flatten()[: angles.shape[-1] // 2], float(scale)
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def get_rotary_seq_len(self, context: Any, transformer: Any, x: Any, config: Any, pack: Pack, **_: Any) -> Tensor:
        assert pack.positions is not None
        return pack.positions

    def forward(self, positions: Tensor, **_: Any) -> Any:
        """float32 ``[T, 1, 1, rotary dims]``; MLA, whose packs have no batch dimension: ``[T, 1, rotary dims]``.
        With YaRN also its scale."""
        self.frequencies = self.frequencies.to(positions.device)
        angles = torch.outer(positions.float(), self.frequencies)
        angles = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        angles = angles.view(len(positions), *(1,) * (1 if self.mla else 2), -1)
        return angles if self.scale is None else (angles, self.scale)


class GroupedExperts(MegatronModule):
    """The experts of one rank as two parameters: ``gate_up [n, 2, f, H]`` and ``down [n, H, f]``.

    Tokens come sorted by expert. On CUDA each projection is one grouped product, on the CPU one per expert.
    Both are always reduced over Megatron's expert-data-parallel group, which leaves no layout out: its own experts
    are not reduced over tensor parallel ranks where EP and ETP are 1.
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any = None, **_: Any) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.tp_group, self.ep_group = pg_collection.expt_tp, pg_collection.ep
        self.dp_group = pg_collection.expt_dp
        width, hidden = config.moe_ffn_hidden_size // self.tp_group.size(), config.hidden_size
        make = {"dtype": config.params_dtype, "device": device_of(config)}
        self.gate_up = nn.Parameter(torch.empty(num_local_experts, 2, width, hidden, **make))
        self.down = nn.Parameter(torch.empty(num_local_experts, hidden, width, **make))
        for parameter in (self.gate_up, self.down):
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """tokens ``[N, H]``, probs ``[N]`` → ``[N, H]``, this rank's share where ETP is over 1."""
        counts = tokens_per_expert.to(tokens.device, torch.int64)
        gate_up = grouped_linear(tokens, self.gate_up.flatten(1, 2), counts)
        gate, up = gate_up.chunk(2, -1)
        inner = (F.silu(gate) * up * probs.unsqueeze(-1)).to(tokens.dtype)
        return grouped_linear(inner, self.down, counts), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """All experts of the model as one tensor each: cut by EP along the first axis, by ETP along the features."""
        found = {}
        axes = {"gate_up": 2, "down": 2}
        for name, parameter in self.named_parameters():
            first = len(sharded_offsets)
            offsets = (
                *sharded_offsets,
                (first, self.ep_group.rank(), self.ep_group.size()),
                (first + axes[name], self.tp_group.rank(), self.tp_group.size()),
            )
            found[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                parameter,
                *offsets,
                replica_id=(0, 0, self.dp_group.rank()),
                prepend_axis_num=first,
            )
        return found


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """``x [N, in]`` by groups of ``counts [n]`` rows with ``weight [n, out, in]`` → ``[N, out]``."""
    if not len(x):  # nothing was sent to these experts; their gradient is 0
        return x @ weight[0].t()
    if x.is_cuda and x.dtype == torch.bfloat16:
        offsets = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)
    parts = x.split(counts.tolist())
    return torch.cat([part @ w.t() for part, w in zip(parts, weight.unbind(0), strict=True)])
