"""Attention to a number of tokens before. transformers passes it to the attention as ``sliding_window``.

Packing, prompt sharing, context parallelism and engine: as full attention, with the window in the mask. The window
counts the tokens of a shared prompt.
"""

from __future__ import annotations

from torch import nn

from slime.models.layer_kinds.kind import LayerKind, Place


def is_windowed(place: Place) -> bool:
    """Whether the layer has a window. A config without ``layer_types`` has the same one for all layers, or none."""
    if not place.type:
        return bool(getattr(place.config, "sliding_window", None))
    return place.type == "sliding_attention"


IN_THE_MASK_ONLY = ("PhimoeAttention",)
"""Classes that do not pass the window of their config to the attention: transformers has it in their mask only."""


def window_of(module: nn.Module, passed: int | None) -> int | None:
    """Return how many tokens a query of an attention module sees, given what the module passes; None for all."""
    if passed is None and type(module).__name__ in IN_THE_MASK_ONLY:
        passed = module.config.sliding_window  # type: ignore[assignment, union-attr]
    return passed


KIND = LayerKind("sliding window", is_windowed, ("sliding_attention",))
