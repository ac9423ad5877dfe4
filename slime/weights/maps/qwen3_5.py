"""Qwen3.5 (text), dense and with experts: Qwen3-Next's layers, with the delta net's projections in four matrices."""

from __future__ import annotations

from slime.weights.maps import qwen3_next
from slime.weights.maps.family import Entry, Family, Settings

PROJECTIONS = tuple(f"in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))


def layer(settings: Settings, index: int) -> list[Entry]:
    return qwen3_next.layer(settings, index, PROJECTIONS)


FAMILY = Family(
    "qwen3_5",
    ("qwen3_5_text", "qwen3_5_moe_text"),
    qwen3_next.settings,
    layer,
    not_divided=qwen3_next.NOT_DIVIDED,
)
