"""Attention to the tokens that an indexer selects (DeepSeek V3.2, GLM-5): refused, because transformers selects them
with a mask over the whole row, which neither packed samples nor the slots of the engine have."""

from __future__ import annotations

from slime.models.layer_kinds.kind import LayerKind

REASON = "selects tokens with a mask over the whole row, which {} does not have"
KIND = LayerKind(
    "sparse indexer",
    lambda place: place.type == "indexed_attention" or bool(place.modules("Indexer")),
    ("indexed_attention",),
    not_packed=REASON.format("a pack"),
    not_served=REASON.format("the embedded engine"),
)
