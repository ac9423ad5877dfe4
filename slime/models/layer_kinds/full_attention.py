"""Attention to all tokens before: the kind of layer of most models.

Packing: each segment attends to itself, and to the prompt that it shares. Context parallelism: ranks gather the keys
and values (``slime/models/packed_attention.py``). Engine: a slot holds the keys and values.
"""

from __future__ import annotations

from slime.models.layer_kinds.kind import LayerKind, Place
from slime.models.layer_kinds.sliding_window import is_windowed


def is_full(place: Place) -> bool:
    """Whether the layer attends to all tokens before. A config without ``layer_types`` has only one kind. A layer of
    type ``hybrid`` has another mixer beside its attention, whose kind explains the type."""
    return place.type in ("full_attention", "hybrid") or not (place.type or is_windowed(place))


KIND = LayerKind("full attention", is_full, ("full_attention",))
