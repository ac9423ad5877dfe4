"""Qwen3.5 (text), dense and with experts: Qwen3-Next's layers, with the delta net's projections in four matrices."""

from __future__ import annotations

from slime.weights.maps import qwen3_next
from slime.weights.maps.family import Entry, Family, Settings
from slime.weights.maps.layouts import ROWS, Layout


def delta_net_layouts(settings: Settings) -> dict[str, Layout]:
    """Return the layouts of the parameters of a gated delta net, by their names in the checkpoint."""
    gates: dict[str, Layout] = {f"in_proj_{name}.weight": ROWS for name in ("z", "b", "a")}
    projection = {"in_proj_qkv.weight": qwen3_next.query_key_value_rows(settings)}
    return {**qwen3_next.inner_layouts(settings), **gates, **projection}


def layer(settings: Settings, index: int) -> list[Entry]:
    return qwen3_next.layer(settings, index, delta_net_layouts)


FAMILY = Family("qwen3_5", ("qwen3_5_text", "qwen3_5_moe_text"), qwen3_next.settings, layer)
