"""The layer with experts: grouped products, and dispatchers that sort tokens without waiting for
the GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)
from torch import Tensor, nn

from slime.models.fused import fused_on_cuda
from slime.models.grouped_experts import (
    Routed,
    combine,
    grouped_linear,
    order_by_expert,
    order_of_chunks,
    spread,
    spread_bias,
)
from slime.plugins.megatron.modules import Offsets, device_of, without_keeping


@fused_on_cuda
def weighted_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    """Return :func:`swiglu` of ``gate_up``, ``[N, 2 f]``, with each row multiplied by its
    weight.
    """
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) * up * weights.unsqueeze(-1)).to(gate_up.dtype)


@fused_on_cuda
def weighted_clamped_swiglu(
    gate_up: Tensor, weights: Tensor, limit: float, offset: float
) -> Tensor:
    """Return ``gate · sigmoid(1.702 gate) · (up + offset)`` of ``gate_up``, ``[N, 2 f]``, with each
    row multiplied by its weight. ``gate`` is at most ``limit``, and ``up`` is between ``-limit``
    and ``limit`` (gpt-oss)."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (gate * torch.sigmoid(1.702 * gate) * (up + offset) * weights.unsqueeze(-1)).to(
        gate_up.dtype
    )


class GroupedExperts(MegatronModule):
    """The experts of a rank as two parameters: ``gate_up [n, 2, f, H]`` and ``down [n, H, f]``.
    With ``add_bias_linear`` there are also ``gate_up_bias [n, 2, f]`` and ``down_bias [n, H]``.

    Tokens are sorted by expert. On CUDA each projection is one grouped product, on the CPU one
    product per expert. The gradients are always reduced over Megatron's expert-data-parallel group,
    which is correct in every layout. Those of Megatron's own experts are not reduced over
    tensor-parallel ranks if EP and ETP are 1.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.tp_group = pg_collection.expt_tp
        self.ep_group = pg_collection.ep
        self.dp_group = pg_collection.expt_dp
        width = config.moe_ffn_hidden_size // self.tp_group.size()
        hidden = config.hidden_size
        make = {"dtype": config.params_dtype, "device": device_of(config)}
        self.gate_up = nn.Parameter(torch.empty(num_local_experts, 2, width, hidden, **make))
        self.down = nn.Parameter(torch.empty(num_local_experts, hidden, width, **make))
        if config.add_bias_linear:
            self.gate_up_bias = nn.Parameter(torch.empty(num_local_experts, 2, width, **make))
            self.down_bias = nn.Parameter(torch.empty(num_local_experts, hidden, **make))
        for parameter in self.parameters():
            parameter.allreduce = False
            parameter.tensor_model_parallel = True

    def forward(
        self, tokens: Tensor | Routed, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return the outputs ``[N, H]`` of ``tokens``, ``[N, H]``, which are sorted by expert.
        ``probs``, ``[N]``, are the routing weights. With expert tensor parallelism, the result is
        this rank's part of a sum over ranks.

        For :class:`Routed` tokens, the backward pass sorts them again, so that their ``k`` copies
        are not kept."""
        # Megatron's dispatcher leaves the counts on the CPU. Grouped products need them on the
        # device of the tokens.
        counts = tokens_per_expert.to(probs.device, torch.int64)
        biased = self.config.add_bias_linear
        up = lambda x: self.project("gate_up", x, counts)  # noqa: E731
        if isinstance(tokens, Routed):
            order = tokens.order
            gate_up = without_keeping(up, lambda hidden: spread(hidden, order), tokens.hidden)
        else:
            gate_up = up(tokens)
        down = lambda inner: self.project("down", inner, counts)  # noqa: E731
        out = without_keeping(down, lambda x: self._activate(x, probs), gate_up)
        if biased:
            out = out + spread_bias(self.down_bias, counts, out) * probs.unsqueeze(-1).to(out.dtype)
        return out, None

    def project(self, name: str, x: Tensor, counts: Tensor) -> Tensor:
        """Multiply the rows of ``x``, ``[N, in]``, by this rank's part of the weights of their
        experts.

        Args:
            name: ``gate_up``, whose bias is added if there is one, or ``down``, whose bias is not.
            counts: ``[n]``, the number of rows of each expert.
        """
        if name == "down":
            return grouped_linear(x, self.down, counts)
        bias = self.gate_up_bias.flatten(1) if self.config.add_bias_linear else None
        return grouped_linear(x, self.gate_up.flatten(1, 2), counts, bias)

    def _activate(self, gate_up: Tensor, probs: Tensor) -> Tensor:
        limit = self.config.activation_func_clamp_value
        if limit is None:
            return weighted_swiglu(gate_up, probs)
        return weighted_clamped_swiglu(gate_up, probs, limit, self.config.glu_linear_offset)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: object = None
    ) -> dict[str, ShardedTensor]:
        """Return the parameters as parts of tensors that contain all experts of the model. EP
        divides these tensors along the first axis, and ETP along the features."""
        found = {}
        axes = {"gate_up": 2, "gate_up_bias": 2, "down": 2, "down_bias": 1}
        # without the factors of adapters
        for name, parameter in self.named_parameters(recurse=False):
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


def replace_dispatcher(layer: MoELayer, groups: ProcessGroupCollection) -> None:
    """Give a layer with experts one of the dispatchers below."""
    config = layer.config
    if config.moe_expert_capacity_factor is not None or config.moe_router_padding_for_quantization:
        return  # tokens have fewer or more experts than top-k: Megatron's dispatcher sorts these
    together = groups.ep.size() == groups.expt_tp.size() == 1 and not layer.shared_expert_overlap
    kind = LocalDispatcher if together else ExchangeDispatcher
    layer.token_dispatcher = kind(
        layer.num_local_experts, layer.local_expert_indices, config=config, pg_collection=groups
    )
    if layer.shared_expert_overlap:
        layer.token_dispatcher.set_shared_experts(layer.shared_experts)


class LocalDispatcher(MoETokenDispatcher):
    """Sorts tokens for experts that are all on this rank. Nothing is exchanged, and the host never
    waits.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens as they are, ``[T, H]``, and the routing weights ``[N]`` in the order
        of the experts.
        """
        self.hidden_shape = tokens.shape
        self.order, weights, self.counts = order_by_expert(
            routing_map, probs, self.config.moe_router_topk
        )
        return tokens.view(-1, tokens.shape[-1]), weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Routed, Tensor, Tensor]:
        """Return what :class:`GroupedExperts` needs: tokens ``[T, H]`` with their order, the number
        of rows of each expert, ``[n]``, and the routing weights, ``[N]``."""
        return Routed(hidden_states, self.order), self.counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the sum of each token's experts, in the shape of the input."""
        return combine(hidden_states, self.order).view(self.hidden_shape)


class ExchangeDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher, which sorts tokens before and after the exchange with
    gathers.
    """

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens, ``[N, H]``, and their weights ``[N]``, sorted by the experts of all
        ranks.
        """
        self.hidden_shape = hidden_states.shape
        self.probs = probs
        self.routing_map = routing_map
        self.tokens_per_expert = self.preprocess(routing_map)
        # Megatron moves these sizes to the host, but the rows are sorted on the device
        if self._sorts_chunks:
            self.chunk_sizes = self.num_global_tokens_per_local_expert.flatten()
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_permutation_1", self.tokens_per_expert
        )
        self.order, weights, _ = order_by_expert(routing_map, probs, self.config.moe_router_topk)
        return spread(hidden_states.view(-1, hidden_states.shape[-1]), self.order), weights

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sort what this rank received (``[N, H]`` and ``[N]``, one chunk for each sending rank and
        expert) by expert.

        Returns:
            The tokens, the number of rows of each expert, ``[n]``, and the routing weights.
        """
        if not self._sorts_chunks:
            return super().dispatch_postprocess(global_input_tokens, global_probs)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(global_input_tokens)
        for point in ("before_permutation_2", "before_finish"):
            self._maybe_dtoh_and_synchronize(point, self.tokens_per_expert)
        self.tokens_per_expert = None
        chunks = self.sort_input_by_local_experts.to(self.chunk_sizes.device)
        self.chunk_order = order_of_chunks(self.chunk_sizes, chunks, len(global_input_tokens))
        counts = self.chunk_sizes.view(-1, self.num_local_experts).sum(0)
        probs = spread(global_probs.unsqueeze(1), self.chunk_order).squeeze(1)
        return spread(global_input_tokens, self.chunk_order), counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Bring the experts' outputs, ``[N, H]``, into the order of the exchange."""
        if not self._sorts_chunks:
            return super().combine_preprocess(hidden_states)
        return combine(hidden_states, self.chunk_order)

    @property
    def _sorts_chunks(self) -> bool:
        """With expert tensor parallelism, Megatron gathers the rows of other ranks first, and sorts
        them itself.
        """
        return self.num_local_experts > 1 and self.tp_size == 1

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Return the sum of each token's experts, in the shape of the input."""
        if self.shared_experts is None:
            return combine(permutated_local_input_tokens, self.order).view(self.hidden_shape)
        self.shared_experts.linear_fc2_forward(permutated_local_input_tokens)
        self.shared_experts.post_forward_comm()
        output = combine(permutated_local_input_tokens, self.order).view(self.hidden_shape)
        return output + self.shared_experts.get_output()
