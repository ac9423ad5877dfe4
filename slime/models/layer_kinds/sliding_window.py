"""Attention to a number of tokens before. transformers passes it to the attention as ``sliding_window``.

Packing, prompt sharing, context parallelism and engine: as full attention, with the window in the mask. The window
counts the tokens of a shared prompt.
"""

from __future__ import annotations

from slime.models.layer_kinds.kind import LayerKind, Place


def is_windowed(place: Place) -> bool:
    """Whether the layer has a window. A config without ``layer_types`` has the same one for all layers, or none."""
    if not place.type:
        return bool(getattr(place.config, "sliding_window", None))
    return place.type == "sliding_attention"


KIND = LayerKind("sliding window", is_windowed, ("sliding_attention",))
