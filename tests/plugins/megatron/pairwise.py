"""A part of all layouts of all model families: each pair of properties once, instead of each
combination.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import TYPE_CHECKING

from needs import ALL
from transformers import PreTrainedConfig

if TYPE_CHECKING:
    from megatron_ranks import Layout

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
SHARED_EXPERTS = ("n_shared_experts", "shared_expert_intermediate_size")
DENSE_LAYERS = ("first_k_dense_replace", "mlp_only_layers")
AMOUNTS = ("log_probs_max_tokens_per_gpu", "entropy_coef", "kl_coef")
"""Flags of which one value is as good as another."""


def traits(config: PreTrainedConfig) -> set[str]:
    """What about a model makes a difference when its weights and its work are divided among
    ranks.
    """
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
    return found | {
        trait for trait, names in marks.items() if any(fields.get(name) for name in names)
    }


def pairwise(plan: Sequence[Layout], kept: Sequence[Layout] = ()) -> list[Layout]:
    """Return ``kept`` and a part of ``plan`` that has all :func:`properties` of the plan; in the
    long circle, the rest of the plan.
    """
    part = cover(plan, kept)
    return [layout for layout in plan if (layout in part) != ALL]


def cover(plan: Sequence[Layout], kept: Sequence[Layout] = ()) -> list[Layout]:
    """Return ``kept`` and a part of ``plan`` that has all :func:`properties` of the plan."""
    of = {layout.name: properties(layout) for layout in plan}
    chosen = list(kept)
    missing = set().union(*of.values()).difference(*(of[layout.name] for layout in kept))
    while missing:  # the layout that adds most for each rank that it needs
        chosen.append(max(plan, key=lambda layout: len(missing & of[layout.name]) / layout.world))
        missing -= of[chosen[-1].name]
    # those chosen later may have all that it has
    for layout in sorted(chosen, key=lambda layout: -layout.world):
        others = [other for other in chosen if other != layout]
        if layout not in kept and of[layout.name] <= set().union(
            *(of[other.name] for other in others)
        ):
            chosen = others
    return chosen


def properties(layout: Layout) -> set[frozenset[str]]:
    """The family, each size and flag with its value, each pair of them, and each of the model's
    traits with each size.

    A pair is one of names: ``TP`` and ``PP`` together, not 2 of the one and 4 of the other. Two
    traits of one model are no pair.
    """
    from tiny_families import CONFIGS

    own = {**layout.megatron, **layout.flags}
    names = [*own, layout.role, *(["rehearsed"] if layout.rehearse else [])]
    sizes = [name for name in layout.megatron if name.endswith("_size")] or ["one rank or replicas"]
    alone = [
        (layout.model,),
        *((f"{name}={value}",) for name, value in own.items() if name not in AMOUNTS),
    ]
    crossed = product(traits(CONFIGS[layout.model]), sizes)
    return {
        *map(frozenset, alone),
        *map(frozenset, combinations(names, 2)),
        *map(frozenset, crossed),
    }
