"""Attention inside chunks of fixed size (Llama 4): refused. transformers makes a mask for it, and scales the queries of
the other layers by the index of their row, which is the position only if the row is one sequence."""

from __future__ import annotations

from slime.models.layer_kinds.kind import LayerKind

REASON = "attends inside chunks of a row and scales queries by the index of their row, which {}"
KIND = LayerKind(
    "chunked attention",
    lambda place: place.type == "chunked_attention",
    ("chunked_attention",),
    not_packed=REASON.format("is wrong for packed samples"),
    not_served=REASON.format("the embedded engine does not have"),
)
