"""Estimated forward FLOPs of one sequence: what balancing over ranks weighs samples by."""

from __future__ import annotations

from typing import Any

_GENERIC_HIDDEN = 4096


def forward_flops(args: Any, length: int) -> float:
    """FLOPs of one forward pass over ``length`` tokens: projections, causal attention, MLPs, LM head.

    Reads Megatron's names (``num_layers, hidden_size, ffn_hidden_size, num_attention_heads,
    num_query_groups, kv_channels, vocab_size``, those of MLA and MoE). Where ``args`` holds no model
    shape, only the ratio of quadratic to linear cost of a generic dense model counts.
    """
    hidden = getattr(args, "hidden_size", None)
    layers = getattr(args, "num_layers", None)
    if not hidden or not layers:
        return 24 * _GENERIC_HIDDEN**2 * length + 2 * _GENERIC_HIDDEN * length**2
    heads = getattr(args, "num_attention_heads", None) or max(hidden // 64, 1)
    projections, score_width = _attention(args, hidden, heads)
    # Two matrix products (scores, values), each 2 FLOPs per element, half of it masked: width * L^2 per layer.
    attention = layers * (2 * projections * length + score_width * length**2)
    mlp = 2 * length * _mlp_parameters(args, hidden, layers)
    vocab = getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None) or 0
    return float(attention + mlp + 2 * length * hidden * vocab)


def _attention(args: Any, hidden: int, heads: int) -> tuple[int, int]:
    """Projection parameters per layer, and heads * (query-key width + value width)."""
    if getattr(args, "multi_latent_attention", False):
        nope, rope, v = args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim
        q_rank, kv_rank = getattr(args, "q_lora_rank", None), args.kv_lora_rank
        query = heads * (nope + rope)
        q = q_rank * (hidden + query) if q_rank else hidden * query
        kv = hidden * (kv_rank + rope) + kv_rank * heads * (nope + v)
        return q + kv + heads * v * hidden, heads * (nope + rope + v)
    width = getattr(args, "kv_channels", None) or hidden // heads
    groups = getattr(args, "num_query_groups", None) or heads
    return 2 * hidden * width * (heads + groups), 2 * heads * width


def _mlp_parameters(args: Any, hidden: int, layers: int) -> int:
    """MLP parameters that one token passes through, over all layers."""
    matrices = 3 if getattr(args, "swiglu", True) else 2
    dense = matrices * hidden * (getattr(args, "ffn_hidden_size", None) or 4 * hidden)
    experts = getattr(args, "num_experts", None)
    if not experts:
        return layers * dense
    expert_width = getattr(args, "moe_ffn_hidden_size", None) or getattr(args, "ffn_hidden_size", None) or 4 * hidden
    shared_width = getattr(args, "moe_shared_expert_intermediate_size", None) or 0
    topk = getattr(args, "moe_router_topk", None) or 1
    sparse = matrices * hidden * (topk * expert_width + shared_width) + hidden * experts
    is_sparse = _moe_layers(getattr(args, "moe_layer_freq", 1), layers)
    return sum(sparse if flag else dense for flag in is_sparse)


def _moe_layers(freq: Any, layers: int) -> list[bool]:
    """Megatron's ``moe_layer_freq``: a period, or one flag per layer."""
    if isinstance(freq, int):
        return [i % max(freq, 1) == 0 for i in range(layers)]
    return [bool(flag) for flag in freq]
