"""What samples cost, and splitting weighted items into balanced parts.

The cost is an estimate of forward FLOPs; parts come from Karmarkar-Karp differencing, longest-first or first-fit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.config.hf_config import SHAPE, lookup_dimension, read_config

_GENERIC_HIDDEN = 4096


def karmarkar_karp(weights: Sequence[float], parts: int, equal_counts: bool = False) -> list[list[int]]:
    """Split items into ``parts`` lists with sums as equal as the largest differencing method makes them.

    Args:
        weights: of the items, not negative.
        parts: number of lists.
        equal_counts: every list gets the same number of items; ``len(weights)`` must be a multiple.

    Returns:
        Lists of item positions in ascending order; the lists are in the order of their first item,
        empty ones last. The result depends on nothing but the arguments.

    Source: Karmarkar and Karp, "The differencing method of set partitioning" (1982), for k parts.
    """
    if parts < 1 or (equal_counts and len(weights) % parts):
        raise ValueError(f"cannot split {len(weights)} items into {parts} parts" + " of equal count" * equal_counts)
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    width = parts if equal_counts else 1
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for serial, start in enumerate(range(0, len(order), width)):
        sets = [(weights[i], [i]) for i in order[start : start + width]]
        sets += [(0.0, []) for _ in range(parts - len(sets))]
        heap.append(_state(sets, serial))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, serial, large = heapq.heappop(heap)
        _, _, small = heapq.heappop(heap)
        # The heaviest set of one meets the lightest of the other, so that their spreads cancel.
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(large, reversed(small), strict=True)]
        heapq.heappush(heap, _state(merged, serial))
    sets = heap[0][2] if heap else [(0.0, [])] * parts
    return sorted((sorted(items) for _, items in sets), key=lambda items: items[0] if items else len(weights))


def _state(sets: list[tuple[float, list[int]]], serial: int) -> tuple[float, int, list[tuple[float, list[int]]]]:
    """(minus the spread, a unique tie breaker, the sets from heavy to light)"""
    sets = sorted(sets, key=lambda s: (-s[0], s[1]))
    return (sets[-1][0] - sets[0][0], serial, sets)


def first_fit(weights: Sequence[float], cap: float) -> list[list[int]]:
    """Put each item, in order, into the first list whose sum stays within ``cap``; an item above it stays alone."""
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
    """Two halves by longest-processing-time-first, each in ascending order; neither is empty for two or more items."""
    halves: tuple[list[int], list[int]] = ([], [])
    sums = [0.0, 0.0]
    for item in sorted(items, key=lambda i: (-weight(i), i)):
        lighter = 0 if not halves[0] or (halves[1] and sums[0] <= sums[1]) else 1
        halves[lighter].append(item)
        sums[lighter] += weight(item)
    return sorted(halves[0]), sorted(halves[1])


@dataclass(frozen=True)
class ModelShape:
    """What the estimate of a model's FLOPs needs to know, by Megatron's names.

    Attributes:
        query_rank: of multi-latent attention; None where queries are projected in one step.
        kv_rank: of multi-latent attention; None for grouped-query attention, which has ``key_width``.
        key_width, value_width: of one head.
        expert_width: of one expert's feed-forward layer.
        sparse_layers: how many layers have experts.
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
        """From the model's flags (``MODEL_ARGS``) as they were given; None where they were not.

        What is absent has Megatron's default.
        """
        given: dict[str, Any] = dict(megatron)
        hidden, layers = given.get("hidden_size"), given.get("num_layers")
        if not hidden or not layers:
            return None
        heads = given.get("num_attention_heads") or max(hidden // 64, 1)
        width = given.get("kv_channels") or hidden // heads
        ffn = given.get("ffn_hidden_size") or 4 * hidden
        mla, experts = bool(given.get("multi_latent_attention")), given.get("num_experts") or 0
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
    def from_checkpoint(cls, checkpoint: str | None) -> ModelShape | None:
        """From config.json of a Hugging Face checkpoint; None where it is not on this machine."""
        config = read_config(checkpoint) if checkpoint else None
        if config is None:
            return None
        given = {name: value for name in SHAPE if (value := lookup_dimension(config, name)[1]) is not None}
        width, dense = given.get("moe_ffn_hidden_size") or 0, config.get("first_k_dense_replace") or 0
        # Older models, such as GPT-2 and Phi, name plain GELU; the gated ones name these activations.
        given["swiglu"] = (config.get("hidden_act") or config.get("hidden_activation")) in ("silu", "gelu_pytorch_tanh")
        given["multi_latent_attention"] = "kv_lora_rank" in given
        shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
        given["moe_shared_expert_intermediate_size"] = shared
        given["moe_layer_freq"] = [int(layer >= dense) for layer in range(given.get("num_layers", 0))]
        return cls.from_megatron(given)


def forward_flops(shape: ModelShape | None, length: int) -> float:
    """FLOPs of one forward pass over ``length`` tokens: projections, causal attention, MLPs, LM head.

    Without a shape, only the ratio of quadratic to linear cost of a generic dense model counts.
    """
    if shape is None:
        return 24 * _GENERIC_HIDDEN**2 * length + 2 * _GENERIC_HIDDEN * length**2
    s = shape
    if s.kv_rank is not None:
        q = s.query_rank * (s.hidden + s.heads * s.key_width) if s.query_rank else s.hidden * s.heads * s.key_width
        # The part of the keys with rotary embeddings is one for all heads and is not stored compressed.
        kv = s.hidden * (s.kv_rank + s.rope_width)
        kv += s.kv_rank * s.heads * (s.key_width - s.rope_width + s.value_width)
        projections = q + kv + s.heads * s.value_width * s.hidden
    else:
        projections = 2 * s.hidden * s.key_width * (s.heads + s.kv_heads)
    # Two matrix products (scores, values), each 2 FLOPs per element, half of it masked: width * L^2 per layer.
    attention = s.layers * (2 * projections * length + s.heads * (s.key_width + s.value_width) * length**2)
    matrices = 3 if s.gated else 2
    dense = matrices * s.hidden * s.ffn
    sparse = matrices * s.hidden * (s.experts_per_token * s.expert_width + s.shared_expert_width) + s.hidden * s.experts
    mlp = 2 * length * ((s.layers - s.sparse_layers) * dense + s.sparse_layers * sparse)
    return float(attention + mlp + 2 * length * s.hidden * s.vocab)
