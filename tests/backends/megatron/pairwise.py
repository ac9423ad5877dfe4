"""Part of a product of model families and layouts: each pair of properties once, instead of each combination."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations, product
from typing import TYPE_CHECKING

from transformers import PreTrainedConfig

if TYPE_CHECKING:
    from megatron_ranks import Layout

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
SHARED_EXPERTS = ("n_shared_experts", "shared_expert_intermediate_size")
DENSE_LAYERS = ("first_k_dense_replace", "mlp_only_layers")


def traits(config: PreTrainedConfig) -> set[str]:
    """What about a model makes a difference when its weights and its work are divided among ranks."""
    fields = config.to_dict()
    rope = fields.get("rope_parameters") or {}
    ropes = [rope, *(of_layers for of_layers in rope.values() if isinstance(of_layers, dict))]
    found = {
        "tied" if fields["tie_word_embeddings"] else "untied",
        *(f"{rope['rope_type']} positions" for rope in ropes if "rope_type" in rope),
        *(f"{kind} layers" for kind in fields.get("layer_types") or ()),
    }
    marks = {
        "experts": EXPERTS,
        "shared experts": SHARED_EXPERTS,
        "experts in some layers": DENSE_LAYERS,
        "latent attention": ("kv_lora_rank",),
        "biases": ("attention_bias",),
        "window": ("sliding_window",),
    }
    return found | {trait for trait, names in marks.items() if any(fields.get(name) for name in names)}


def pairwise(plan: Sequence[Layout], kept: Sequence[Layout] = ()) -> list[Layout]:
    """Return ``kept`` and a part of ``plan`` that has each family, and each pair of properties that the plan has.

    The properties of a layout are the traits of its model, its sizes and its flags; two traits of one model are no
    pair. The long circle (``SLIME_TESTS=all``) has the whole plan.
    """
    if os.environ.get("SLIME_TESTS") == "all":
        return list(plan)
    chosen = list(kept)
    missing = set().union(*map(_properties, plan)).difference(*map(_properties, kept))
    while missing:  # the layout that adds most for each rank that it needs
        chosen.append(max(plan, key=lambda layout: len(missing & _properties(layout)) / layout.world))
        missing -= _properties(chosen[-1])
    return [layout for layout in plan if layout in chosen]


def _properties(layout: Layout) -> set[frozenset[str]]:
    """The family, the family with its matrices divided (where errors of maps show), and all pairs."""
    from tiny_families import CONFIGS

    own = [f"{name}={value}" for name, value in {**layout.megatron, **layout.flags}.items()]
    own += [layout.role, *(["rehearsed"] if layout.rehearse else [])]
    families = [(layout.model,), (layout.model, "divided")][: 1 + ("tensor_model_parallel_size" in layout.megatron)]
    crossed = product(traits(CONFIGS[layout.model]), own)
    return {*map(frozenset, families), *map(frozenset, combinations(own, 2)), *map(frozenset, crossed)}
