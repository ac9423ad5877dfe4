"""The cost of samples, an estimate of the FLOPs of a forward pass, and algorithms that split
weighted items.

The algorithms are longest processing time first, and first-fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.config.hf_config import SHAPE, lookup_dimension

_GENERIC_HIDDEN = 4096


def first_fit(weights: Sequence[float], cap: float) -> list[list[int]]:
    """Put each item, in order, into the first list whose sum stays within ``cap``; a larger item
    stays alone.
    """
    bins: list[list[int]] = []
    sums: list[float] = []
    for i, weight in enumerate(weights):
        for b, total in enumerate(sums):
            if total + weight <= cap:
                bins[b].append(i)
                sums[b] += weight
                break
        else:
            bins.append([i])
            sums.append(weight)
    return bins


def split_in_two(items: list[int], weight: Callable[[int], float]) -> tuple[list[int], list[int]]:
    """Split items into two halves, longest first, each into the lighter half.

    Both are in ascending order. With two or more items, neither half is empty.
    """
    halves: tuple[list[int], list[int]] = ([], [])
    sums = [0.0, 0.0]
    for item in sorted(items, key=lambda i: (-weight(i), i)):
        lighter = 0 if not halves[0] or (halves[1] and sums[0] <= sums[1]) else 1
        halves[lighter].append(item)
        sums[lighter] += weight(item)
    return sorted(halves[0]), sorted(halves[1])


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a model from which its FLOPs are estimated.

    Attributes:
        query_rank: Rank of the query projection in multi-latent attention; None if queries are
            projected in one step.
        kv_rank: Rank of the key-value projection in multi-latent attention; None with grouped-query
            attention.
        key_width, value_width: Dimensions of one head.
        expert_width: Intermediate size of one expert.
        sparse_layers: Number of layers that have experts.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    ffn: int
    vocab: int = 0
    gated: bool = True
    query_rank: int | None = None
    kv_rank: int | None = None
    rope_width: int = 0
    experts: int = 0
    experts_per_token: int = 1
    expert_width: int = 0
    shared_expert_width: int = 0
    sparse_layers: int = 0

    @classmethod
    def from_megatron(cls, megatron: Mapping[str, object]) -> ModelShape | None:
        """Read the shape from the model's flags (``MODEL_ARGS``); None if these flags were not
        given.

        Dimensions that were not given have Megatron's defaults.
        """
        given: dict[str, Any] = dict(megatron)
        hidden = given.get("hidden_size")
        layers = given.get("num_layers")
        if not hidden or not layers:
            return None
        # Megatron's own defaults, where a flag was not given.
        heads = given.get("num_attention_heads") or max(hidden // 64, 1)
        width = given.get("kv_channels") or max(hidden // heads, 1)
        ffn = given.get("ffn_hidden_size") or 4 * hidden
        # With multi-latent attention, a key is a compressed part and a part with rotary embeddings.
        mla = bool(given.get("multi_latent_attention"))
        experts = given.get("num_experts") or 0
        rope = given.get("qk_pos_emb_head_dim", 64) if mla else 0
        freq = given.get("moe_layer_freq", 1)  # a period, or one flag per layer
        sparse = -(-layers // max(freq, 1)) if isinstance(freq, int) else sum(map(bool, freq))
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=given.get("num_query_groups") or heads,
            key_width=given.get("qk_head_dim", 128) + rope if mla else width,
            value_width=given.get("v_head_dim", 128) if mla else width,
            ffn=ffn,
            vocab=given.get("padded_vocab_size") or given.get("vocab_size") or 0,
            gated=bool(given.get("swiglu")),
            query_rank=given.get("q_lora_rank") if mla else None,
            kv_rank=given.get("kv_lora_rank", 32) if mla else None,
            rope_width=rope,
            experts=experts,
            experts_per_token=given.get("moe_router_topk", 2),
            expert_width=given.get("moe_ffn_hidden_size") or ffn,
            shared_expert_width=given.get("moe_shared_expert_intermediate_size") or 0,
            sparse_layers=sparse if experts else 0,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """Read the shape from the content of a config.json; None if it lacks the number of layers
        or the hidden size.

        A dimension that is not a positive integer counts as missing; of a list of sizes, the mean
        counts.
        """
        # config.json of each family has names of its own for these dimensions.
        given = {name: size for name in SHAPE if (size := _size(lookup_dimension(config, name)[1]))}
        width = given.get("moe_ffn_hidden_size", 0)
        dense = _size(config.get("first_k_dense_replace"))
        # config.json does not say whether the MLP is gated. Models with a gated one name these
        # activations, while older models, such as GPT-2 and Phi, name plain GELU.
        swiglu = (config.get("hidden_act") or config.get("hidden_activation")) in (
            "silu",
            "gelu_pytorch_tanh",
        )
        shared = (
            _size(config.get("shared_expert_intermediate_size"))
            or _size(config.get("n_shared_experts")) * width
        )
        other: dict[str, object] = {
            "swiglu": swiglu,
            "multi_latent_attention": "kv_lora_rank" in given,
            "moe_shared_expert_intermediate_size": shared,
            "moe_layer_freq": [int(layer >= dense) for layer in range(given.get("num_layers", 0))],
        }
        return cls.from_megatron({**given, **other})


def _size(value: object) -> int:
    """Return a dimension of config.json; 0 if it is none."""
    if isinstance(value, list) and value and all(map(_size, value)):
        return round(sum(map(_size, value)) / len(value))
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def forward_flops(shape: ModelShape | None, length: int) -> float:
    """FLOPs of a forward pass over one sample of ``length`` tokens: projections, causal attention,
    MLPs, LM head.

    Without a shape, the result is only proportional to the cost of a generic dense model. That
    suffices for balancing, which compares costs.
    """
    if shape is None:
        return 24 * _GENERIC_HIDDEN**2 * length + 2 * _GENERIC_HIDDEN * length**2
    s = shape
    # Projections: multi-latent attention goes through its ranks, grouped-query attention does not.
    if s.kv_rank is not None:
        q = (
            s.query_rank * (s.hidden + s.heads * s.key_width)
            if s.query_rank
            else s.hidden * s.heads * s.key_width
        )
        # All heads share the part of the keys with rotary embeddings (RoPE), and it is not
        # compressed.
        kv = s.hidden * (s.kv_rank + s.rope_width)
        kv += s.kv_rank * s.heads * (s.key_width - s.rope_width + s.value_width)
        projections = q + kv + s.heads * s.value_width * s.hidden
    else:
        projections = 2 * s.hidden * s.key_width * (s.heads + s.kv_heads)
    # Attention has two matrix products (scores and values) with 2 FLOPs per multiply-add. The
    # causal mask removes half of them, so that heads * width * length^2 FLOPs per layer remain of
    # each.
    attention = s.layers * (
        2 * projections * length + s.heads * (s.key_width + s.value_width) * length**2
    )
    # MLPs: dense layers, and layers with experts, of which each token uses a few.
    matrices = 3 if s.gated else 2
    dense = matrices * s.hidden * s.ffn
    sparse = (
        matrices * s.hidden * (s.experts_per_token * s.expert_width + s.shared_expert_width)
        + s.hidden * s.experts
    )
    mlp = 2 * length * ((s.layers - s.sparse_layers) * dense + s.sparse_layers * sparse)
    return float(attention + mlp + 2 * length * s.hidden * s.vocab)
